//! Arguments become one call, and a result becomes words and an exit code.

mod architecture;
mod bench;
mod calibrate;
mod check;
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
mod options;
mod plan;
mod process;
mod recipe_file;
mod report;
mod score;
mod serve;
mod shell;
mod used_model;
mod values;
mod verify;
mod world;

use clap::{Command, Subcommand};

use self::options::SharedOptions;
use crate::recipe::TrainedWeights::{Adapter, All};
use crate::units::Fault;

pub use process::main;

// Arguments that several commands share have no documentation of their own: clap would take it for that of the command.

/// Each command with its arguments, and how it is run: with the options that all take, and the parser of them all. It returns the exit code.
macro_rules! verbs {
    (|$verb:ident, $options:ident, $parser:ident| $($(#[$attribute:meta])* $name:ident($arguments:ty) => $run:expr,)*) => {
        #[derive(Debug, Subcommand)]
        enum Verb {
            $($(#[$attribute])* $name($arguments)),*
        }

        impl Verb {
            fn run(&self, $options: &SharedOptions, $parser: fn() -> Command) -> Result<i32, Fault> {
                match self {
                    $(Self::$name($verb) => $run),*
                }
            }
        }
    };
}

const fn done((): ()) -> i32 {
    0
}

verbs! { |verb, options, parser|
    Init(init::Init) => verb.run(options.device()?).map(done),
    /// Train a LoRA adapter for a model.
    #[command(visible_alias = "train")]
    FinetuneLora(finetune::Finetune) => options.with_ranks(verb.joining, |device, world| verb.run(Adapter, device, world)),
    /// Train all weights of a model.
    FinetuneFull(finetune::Finetune) => options.with_ranks(verb.joining, |device, world| verb.run(All, device, world)),
    Resume(finetune::Resume) => options.with_ranks(verb.joining, |device, world| verb.run(device, world)),
    Launch(launch::LaunchRanks) => verb.run(options, parser),
    Evaluate(Box<evaluate::Evaluate>) => options.with_ranks(verb.joining, |device, world| verb.run(device, world)).map(done),
    Calibrate(calibrate::Calibrate) => verb.run(options.device()?).map(done),
    Score(score::ScoreAnswers) => verb.run().map(done),
    Generate(Box<generate::Generate>) => verb.run(options.device()?),
    Serve(serve::Serve) => verb.run(options.device()?).map(done),
    Export(export::Export) => verb.run(),
    Inspect(inspect::Inspect) => verb.run().map(done),
    Report(report::ReportRuns) => verb.run().map(done),
    Verify(verify::Verify) => verb.run(options.device()?).map(done),
    Check(check::Check) => options.with_ranks(verb.joining, |device, world| verb.run(device, world)).map(done),
    Data(data::LookAtData) => verb.run().map(done),
    Plan(plan::Plan) => options.with_ranks(verb.joining, |device, world| verb.run(device, world)).map(done),
    Bench(bench::BenchSteps) => options.with_ranks(verb.joining, |device, world| verb.run(device, world)).map(done),
    Doctor(doctor::Doctor) => verb.run(options.device, options.threads).map(done),
    InitModel(init_model::InitModel) => verb.run().map(done),
    Completions(shell::Completions) => verb.run(parser()).map(done),
    Man(shell::ManPages) => verb.run(parser()).map(done),
}
