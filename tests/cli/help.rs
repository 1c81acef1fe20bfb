//! `--help` and `--version`: every verb says what it is for, and every option what it does.

use insta::assert_snapshot;

use super::place::Place;

fn help(verb: &str) -> String {
    let place = Place::new();
    let said = place.run(&[verb, "--help"]).done();
    assert_eq!(said.err, "");
    said.out.trim_end().to_owned()
}

#[test]
fn version() {
    let said = Place::new().run(&["--version"]).done();
    assert_eq!(said.out, format!("kvtune {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_verbs() {
    let said = Place::new().run(&["--help"]).done();
    assert_snapshot!(said.out.trim_end(), @r"
    Fine-tunes language models on very long sequences, with the KV-cache policy in the loop

    Usage: kvtune [OPTIONS] <COMMAND>

    Commands:
      init           Write a recipe for a model and data, or from another trainer's YAML
      finetune-lora  Train a LoRA adapter for a model [alias: train]
      finetune-full  Train all weights of a model
      resume         Resume a run from a checkpoint
      launch         Start several ranks of a command on this machine, as torchrun does
      evaluate       Evaluate runs, checkpoints and models with one or several caches: loss, accuracy, generated answers
      calibrate      Calibrate the cache of a model: gates for the policy `learned`, query statistics for `triattention`, slots for each layer
      score          Score a file of answers: exact match, F1, ROUGE, RULER's string match and others
      generate       Generate text with a run, a checkpoint or a model, through the cache that it was trained with
      serve          Serve a run, a checkpoint or a model over HTTP with an OpenAI-compatible API
      export         Export a trained adapter or model for PEFT, Transformers, vLLM, llama.cpp or Ollama
      inspect        Show a run or a checkpoint: settings, figures, files, loss curve; or what the caches of a replay log kept
      report         Write one HTML page about one or several runs: curves, scores, answers, settings that differ
      verify         Prove the gradients on your model and data against plain autograd
      check          Check a recipe, its model and its data, and print what would run
      data           Show the rows of data files: what is trained, dropped and cut
      plan           Predict memory and time of a step, and choose the best tiling
      bench          Time training steps on random tokens, part by part
      doctor         Check this machine: libtorch, CPU, driver, GPUs and CUDA libraries, and what does not work and why
      init-model     Write a small random checkpoint with a tokenizer of its own, for tests and demonstrations
      completions    Print the script by which a shell completes the commands
      man            Write the manual pages, which `man` shows
      help           Print this message or the help of the given subcommand(s)

    Options:
          --device <DEVICE>  Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>      CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>  How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet            Print only results, warnings and errors
      -v, --verbose          Print more: every training step, and notes each time
      -h, --help             Print help
      -V, --version          Print version
    ");
}

#[test]
fn finetune_lora() {
    assert_snapshot!(help("finetune-lora"), @r"
    Train a LoRA adapter for a model

    Usage: kvtune finetune-lora [OPTIONS] <RECIPE|--recipe <FILE>>

    Arguments:
      [RECIPE]  The recipe, a TOML file

    Options:
          --recipe <FILE>        The recipe, instead of RECIPE
          --out <DIR>            Directory of the run; must be empty or not exist. Default: the recipe's `output_dir`, else `runs/NAME-DATE` by the recipe's name
          --set <a.b=c>          Override a key of the recipe
          --resume-if-possible   Resume the run in the output directory if this command has begun one there, else begin it: for schedulers that restart jobs
          --profile-memory       Print the memory of the heaviest step by part at the end, and write it to `summary.md`
          --dist-timeout <TIME>  Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat [default: 10m]
          --backend <BACKEND>    Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available [default: auto]
          --device <DEVICE>      Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>          CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>      How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet                Print only results, warnings and errors
      -v, --verbose              Print more: every training step, and notes each time
      -h, --help                 Print help
      -V, --version              Print version

    Examples:
      kvtune finetune-lora my.toml --out runs/my
      kvtune finetune-lora my.toml --set optimizer.learning_rate=1e-4 --set train.max_steps=100
    ");
}

#[test]
fn finetune_full() {
    let options = |help: &str| help.split_once("Options:")?.1.split_once("Examples:").map(|(options, _)| options.to_owned());
    let (full, lora) = (help("finetune-full"), help("finetune-lora"));
    assert!(
        full.starts_with("Train all weights of a model\n\nUsage: kvtune finetune-full [OPTIONS] <RECIPE|--recipe <FILE>>"),
        "{full}"
    );
    assert_eq!(options(&full), options(&lora), "the same options");
}

#[test]
fn resume() {
    assert_snapshot!(help("resume"), @r"
    Resume a run from a checkpoint

    Usage: kvtune resume [OPTIONS] <RUN>

    Arguments:
      <RUN>  The directory of the run

    Options:
          --from <step-000100>   Checkpoint to go on from; the newest valid one, if left out
          --set <a.b=c>          Override a key of the recipe: length of the run, logging, saving, tiling (`grad.*`), `kv_cache.cpu_offload`, paths of model and data
          --profile-memory       Print the memory of the heaviest step by part at the end, and write it to `summary.md`
          --dist-timeout <TIME>  Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat [default: 10m]
          --backend <BACKEND>    Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available [default: auto]
          --device <DEVICE>      Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>          CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>      How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet                Print only results, warnings and errors
      -v, --verbose              Print more: every training step, and notes each time
      -h, --help                 Print help
      -V, --version              Print version

    Examples:
      kvtune resume runs/my
      kvtune resume runs/my --from step-000100 --set train.epochs=2
    ");
}

#[test]
fn evaluate() {
    assert_snapshot!(help("evaluate"), @r#"
    Evaluate runs, checkpoints and models with one or several caches: loss, accuracy, generated answers

    Usage: kvtune evaluate [OPTIONS] [RUN|CHECKPOINT|MODEL]...

    Arguments:
      [RUN|CHECKPOINT|MODEL]...  Runs (their `final`, else their newest checkpoint), checkpoints, and models, which have no adapter

    Options:
          --base <MODEL>              Evaluate this model without an adapter; may be given several times
          --recipe <FILE>             The recipe to evaluate with; a run's own, if left out, and for a model that of the first run
          --policy <POLICY>           Eviction policies to evaluate, separated by commas. The recipe's own policy keeps its parameters, others have their defaults [possible values: adakv, defensivekv, dense, dropkv, expected-attention, h2o, h2o-orig, h2o-vlen, keydiff, knorm, lagkv, lastrec, learned, qh2o, qh2o-vlen, rkv, smart-lastrec, snapkv, streaming-llm, tova, triattention]
          --cache-length <N>          Cache slots per KV head to evaluate, separated by commas. `dense` keeps every entry and is evaluated once
          --set <a.b=c>               Override a key of the recipe
          --split <SPLIT>             Which samples to use; `rest`: those of the training file that `data.on_too_long = "drop"` leaves out [default: validation] [possible values: train, validation, rest]
          --limit <N>                 Use only the first N samples of the split
          --losses <FILE>             Write the losses of each sample and target to this JSONL file. Where answers are generated, losses are computed only with it or with `--token-classes`
          --token-classes <FILE>      Report losses by classes of tokens, too, which this file names: JSON lines `{"sample": 3, "classes": {"far": [0, 17]}}`, targets being counted from 0
          --generate                  Write an answer to each prompt, greedily unless told otherwise, and score it: `longbench_v2` for LongBench v2, `ruler_all` for RULER, `substring` for HELMET, else `exact_match` and `f1`
          --metrics <METRIC>          Generate an answer to each prompt, and score it by these metrics, separated by commas
          --answers <FILE>            Generate an answer to each prompt, and keep it in this JSONL file; answers that it already has are not generated again. Default: a file for each cache in the folder `answers` of the run
          --batch <N>                 Maximum number of answers generated at once [default: 8]
          --max-new-tokens <N>        Maximum number of new tokens [alias: --max-tokens]
          --greedy                    Greedy decoding: take the most likely token each time
          --temperature <T>           Sample, with this temperature [alias: --temp]
          --top-k <K>                 Sample from the K most likely tokens; 0 for all
          --top-p <P>                 Sample from the smallest set of tokens whose probabilities add up to P (nucleus sampling)
          --min-p <P>                 Sample from tokens with at least P times the probability of the most likely one
          --repetition-penalty <X>    Penalty on tokens that have occurred; 1 is none
          --no-repeat-ngram-size <N>  Let no n-gram of N tokens occur twice
          --min-new-tokens <N>        Minimum number of new tokens before an end token
          --device <DEVICE>           Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --stop <TEXT>               Stop string: the text ends before it; may be given several times
          --eos <ID>                  Id of the end token (EOS), in place of the model's own; may be given several times
          --threads <N>               CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>           How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
          --ignore-eos                Ignore end tokens (EOS)
      -q, --quiet                     Print only results, warnings and errors
          --seed <N>                  Seed of sampling: the same seed gives the same texts, whatever else is generated
          --replay-log <FILE>         Write what the cache evicts over the longest of the samples to this file, for `kvtune inspect --evictions`
      -v, --verbose                   Print more: every training step, and notes each time
          --dist-timeout <TIME>       Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat [default: 10m]
          --backend <BACKEND>         Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available [default: auto]
      -h, --help                      Print help
      -V, --version                   Print version

    Examples:
      kvtune evaluate runs/my --policy dense,h2o
      kvtune evaluate runs/my --base Qwen2.5-0.5B --metrics f1,rouge_l
    "#);
}

#[test]
fn inspect() {
    assert_snapshot!(help("inspect"), @r"
    Show a run or a checkpoint: settings, figures, files, loss curve; or what the caches of a replay log kept

    Usage: kvtune inspect [OPTIONS] <RUN|CHECKPOINT|--evictions <LOG>>

    Arguments:
      [RUN|CHECKPOINT]  A run or one of its checkpoints

    Options:
          --evictions <LOG>  Look at this replay log instead: which positions each layer and KV head kept. `kvtune evaluate --replay-log` writes one
          --out <FILE>       Draw these positions as SVG
          --sequence <N>     Which sequence of the log, counted from 0 [default: 0]
          --device <DEVICE>  Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>      CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>  How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet            Print only results, warnings and errors
      -v, --verbose          Print more: every training step, and notes each time
      -h, --help             Print help
      -V, --version          Print version

    Examples:
      kvtune inspect runs/my
      kvtune inspect --evictions log.safetensors --out kept.svg
    ");
}

#[test]
fn report() {
    assert_snapshot!(help("report"), @r"
    Write one HTML page about one or several runs: curves, scores, answers, settings that differ

    Usage: kvtune report [OPTIONS] <RUN|CHECKPOINT>...

    Arguments:
      <RUN|CHECKPOINT>...  Runs or checkpoints, which are compared

    Options:
          --out <FILE>       The page to write, in HTML [default: `report.html` in the first run, `report-NAME.html` beside a checkpoint]
          --scores <FILE>    Also show the scores of this file, printed by `kvtune evaluate --format json`; may be given several times
          --evictions <LOG>  Draw what the caches of this replay log kept; may be given several times
          --device <DEVICE>  Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>      CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>  How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet            Print only results, warnings and errors
      -v, --verbose          Print more: every training step, and notes each time
      -h, --help             Print help
      -V, --version          Print version

    Examples:
      kvtune report runs/my
      kvtune report runs/h2o runs/lastrec --out compared.html
    ");
}

#[test]
fn verify() {
    assert_snapshot!(help("verify"), @r"
    Prove the gradients on your model and data against plain autograd

    Usage: kvtune verify [OPTIONS] <RECIPE|--recipe <FILE>|--conformance <DIR>>

    Arguments:
      [RECIPE]  The recipe, a TOML file

    Options:
          --recipe <FILE>      The recipe, instead of RECIPE
          --set <a.b=c>        Override a key of the recipe
          --full               Train all weights and no adapter, as `finetune-full` does
          --conformance <DIR>  Instead test that the cache evicts what `kv_policy.json` of this checkpoint or export records
          --base <MODEL>       Base model of the adapter. Default: the one that the adapter names
          --every-tiling       Prove other tilings than the recipe's too: shapes of cells, stores, caches that wait on the host
          --samples <K>        Samples to prove, from the start of the training file, in one batch. Default: `train.micro_batch_size`; with `--dump`, all samples of the file
          --dump <DIR>         Write loss, gradients, logits, evictions and the replay log to this directory
          --replay-log <FILE>  Evict what this replay log of an earlier dump says, instead of asking the policy
          --device <DEVICE>    Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>        CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>    How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet              Print only results, warnings and errors
      -v, --verbose            Print more: every training step, and notes each time
      -h, --help               Print help
      -V, --version            Print version

    Examples:
      kvtune verify my.toml
      kvtune verify --conformance runs/my/final
    ");
}

#[test]
fn check() {
    assert_snapshot!(help("check"), @r"
    Check a recipe, its model and its data, and print what would run

    Usage: kvtune check [OPTIONS] <RECIPE|--recipe <FILE>>

    Arguments:
      [RECIPE]  The recipe, a TOML file

    Options:
          --recipe <FILE>        The recipe, instead of RECIPE
          --set <a.b=c>          Override a key of the recipe
          --full                 Train all weights and no adapter, as `finetune-full` does
          --dist-timeout <TIME>  Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat [default: 10m]
          --backend <BACKEND>    Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available [default: auto]
          --device <DEVICE>      Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>          CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>      How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet                Print only results, warnings and errors
      -v, --verbose              Print more: every training step, and notes each time
      -h, --help                 Print help
      -V, --version              Print version

    Examples:
      kvtune check my.toml
      kvtune check my.toml --set kv_cache.cache_length=4096
    ");
}

#[test]
fn plan() {
    assert_snapshot!(help("plan"), @r"
    Predict memory and time of a step, and choose the best tiling

    Usage: kvtune plan [OPTIONS] <RECIPE|--recipe <FILE>>

    Arguments:
      [RECIPE]  The recipe, a TOML file

    Options:
          --recipe <FILE>          The recipe, instead of RECIPE
          --set <a.b=c>            Override a key of the recipe
          --full                   Train all weights and no adapter, as `finetune-full` does
          --tokens <N>             Plan for sequences of N tokens, all of them targets, instead of the heaviest batch of the recipe's data
          --device-memory <BYTES>  Plan for a GPU with this much memory, for example `40GB` or `80GiB`. If this machine has no GPU, no time is estimated
          --host-memory <BYTES>    Host memory limit. Default: the available memory
          --scratch-space <BYTES>  Disk space for scratch files. Default: the free space of `grad.scratch_dir`, else of `output_dir`
          --dist-timeout <TIME>    Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat [default: 10m]
          --backend <BACKEND>      Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available [default: auto]
          --device <DEVICE>        Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>            CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>        How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet                  Print only results, warnings and errors
      -v, --verbose                Print more: every training step, and notes each time
      -h, --help                   Print help
      -V, --version                Print version

    Examples:
      kvtune plan my.toml
      kvtune plan my.toml --tokens 100000 --device-memory 80GB
    ");
}

#[test]
fn bench() {
    assert_snapshot!(help("bench"), @r"
    Time training steps on random tokens, part by part

    Usage: kvtune bench [OPTIONS] --tokens <N> --steps <K> <RECIPE|--recipe <FILE>>

    Arguments:
      [RECIPE]  The recipe, a TOML file

    Options:
          --recipe <FILE>        The recipe, instead of RECIPE
          --set <a.b=c>          Override a key of the recipe
          --full                 Train all weights and no adapter, as `finetune-full` does
          --tokens <N>           Tokens of each of the `train.micro_batch_size` sequences; or one number for each, separated by commas
          --steps <K>            Steps to time
          --warmup <W>           Warm-up steps, which are shown but not counted [default: 1]
          --random-weights       Use random weights, drawn on the device; of the model's directory only `config.json` is read
          --profile-memory       Print the memory of the last step by part
          --dist-timeout <TIME>  Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat [default: 10m]
          --backend <BACKEND>    Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available [default: auto]
          --device <DEVICE>      Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>          CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>      How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet                Print only results, warnings and errors
      -v, --verbose              Print more: every training step, and notes each time
      -h, --help                 Print help
      -V, --version              Print version

    Examples:
      kvtune bench my.toml --tokens 32768 --steps 3
      kvtune bench my.toml --tokens 32768 --steps 3 --random-weights
    ");
}

#[test]
fn doctor() {
    assert_snapshot!(help("doctor"), @r"
    Check this machine: libtorch, CPU, driver, GPUs and CUDA libraries, and what does not work and why

    Usage: kvtune doctor [OPTIONS]

    Options:
          --scratch-dir <DIR>    Directory for scratch files, whose free space is reported [default: .]
          --json                 Print JSON, as `--format json` does
          --dist-timeout <TIME>  Time-out of several ranks: for all of them to start, and for one that hangs or sends no heartbeat [default: 10m]
          --backend <BACKEND>    Backend of collectives between ranks: `nccl` (GPU to GPU), `gloo` (through the host), or `auto`: `nccl` where it is available [default: auto]
          --device <DEVICE>      Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>          CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>      How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet                Print only results, warnings and errors
      -v, --verbose              Print more: every training step, and notes each time
      -h, --help                 Print help
      -V, --version              Print version

    Examples:
      kvtune doctor
      kvtune doctor --json
    ");
}

#[test]
fn init_model() {
    assert_snapshot!(help("init-model"), @r"
    Write a small random checkpoint with a tokenizer of its own, for tests and demonstrations

    Usage: kvtune init-model [OPTIONS] --config <FILE> --out <DIR>

    Options:
          --config <FILE>             Hugging Face `config.json` of the model to make
          --tokenizer-from <TEXT>...  Texts to train the byte-level BPE tokenizer on; its size is the config's `vocab_size`. Without any the model has no tokenizer, for data of token ids
          --out <DIR>                 Directory to write; must be empty or not exist
          --seed <SEED>               The seed of the weights [default: 1]
          --device <DEVICE>           Where to compute: `auto`, `cpu`, `cuda` or `cuda:1` [default: auto]
          --threads <N>               CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number
          --format <FORMAT>           How to print results: words and tables, or a JSON object per line [default: text] [possible values: text, json]
      -q, --quiet                     Print only results, warnings and errors
      -v, --verbose                   Print more: every training step, and notes each time
      -h, --help                      Print help
      -V, --version                   Print version

    Examples:
      kvtune init-model --config config.json --out model
      kvtune init-model --config config.json --tokenizer-from a.txt b.txt --out model
    ");
}
