//! Arguments become one call, and a result becomes words and an exit code.

mod architecture;
mod bench;
mod calibrate;
mod check;
mod command;
mod counts;
mod data;
mod device;
mod doctor;
mod evaluate;
mod export;
mod finetune;
mod generate;
mod init;
mod init_model;
mod inspect;
mod launch;
mod limits;
mod panics;
mod plan;
mod process;
mod recipe_file;
mod report;
mod score;
mod serve;
mod shell;
mod used_model;
mod verify;
mod world;

use std::path::PathBuf;

use clap::Subcommand;
use clap_complete::Shell;

pub use process::main;

#[derive(Debug, Subcommand)]
enum Verb {
    /// Write a recipe for a model and data, or from another trainer's YAML.
    Init(init::Init),
    /// Train a LoRA adapter for a model.
    #[command(visible_alias = "train")]
    FinetuneLora(finetune::Finetune),
    /// Train all weights of a model.
    FinetuneFull(finetune::Finetune),
    /// Resume a run from a checkpoint.
    Resume(finetune::Resume),
    /// Start several ranks of a command on this machine, as torchrun does.
    Launch(launch::LaunchRanks),
    /// Evaluate runs, checkpoints and models with one or several caches: loss, accuracy, generated answers.
    Evaluate(Box<evaluate::Evaluate>),
    /// Calibrate the cache of a model: gates for the policy `learned`, query statistics for `triattention`, slots for each layer.
    Calibrate(calibrate::Calibrate),
    /// Score a file of answers: exact match, F1, ROUGE, RULER's string match and others.
    Score(score::ScoreAnswers),
    /// Generate text with a run, a checkpoint or a model, through the cache that it was trained with.
    Generate(Box<generate::Generate>),
    /// Serve a run, a checkpoint or a model over HTTP with an OpenAI-compatible API.
    Serve(serve::Serve),
    /// Export a trained adapter or model for PEFT, Transformers, vLLM, llama.cpp or Ollama.
    Export(export::Export),
    /// Show a run or a checkpoint: settings, figures, files, loss curve; or what the caches of a replay log kept.
    Inspect(inspect::Inspect),
    /// Write one HTML page about one or several runs: curves, scores, answers, settings that differ.
    Report(report::ReportRuns),
    /// Prove the gradients on your model and data against plain autograd.
    Verify(verify::Verify),
    /// Check a recipe, its model and its data, and print what would run.
    Check(check::Check),
    /// Show the rows of data files: what is trained, dropped and cut.
    Data(data::LookAtData),
    /// Predict memory and time of a step, and choose the best tiling.
    Plan(plan::Plan),
    /// Time training steps on random tokens, part by part.
    Bench(bench::BenchSteps),
    /// Check this machine: libtorch, CPU, driver, GPUs and CUDA libraries, and what does not work and why.
    Doctor(doctor::Doctor),
    /// Write a small random checkpoint with a tokenizer of its own, for tests and demonstrations.
    InitModel(init_model::InitModel),
    /// Print the script by which a shell completes the commands.
    Completions {
        /// The shell that reads the script.
        #[arg(value_enum, value_name = "SHELL")]
        shell: Shell,
    },
    /// Write the manual pages, which `man` shows.
    Man {
        /// Directory to write them to; it is made if it is not there.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}
