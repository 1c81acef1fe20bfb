//! The command line as a whole: the parser of arguments, with two examples below the help of each verb.

use std::ffi::OsString;

use clap::{Command, CommandFactory, FromArgMatches};

use super::Arguments;

/// What each verb's help ends with.
const EXAMPLES: &[(&str, [&str; 2])] = &[
    ("init", ["--model Qwen2.5-0.5B --data train.jsonl > my.toml", "--from axolotl.yaml > my.toml"]),
    ("finetune-lora", ["my.toml --out runs/my", "my.toml --set optimizer.learning_rate=1e-4 --set train.max_steps=100"]),
    ("finetune-full", ["my.toml --out runs/my", "my.toml --set model.dtype=bf16"]),
    ("resume", ["runs/my", "runs/my --from step-000100 --set train.epochs=2"]),
    ("launch", ["--nproc 2 -- train my.toml --out runs/my", "--nproc 2 -- doctor"]),
    ("evaluate", ["runs/my --policy dense,h2o", "runs/my --base Qwen2.5-0.5B --metrics f1,rouge_l"]),
    ("score", ["answers.jsonl --metrics f1", "answers.jsonl --metrics exact_match,rouge_l --by length"]),
    ("generate", ["runs/my --prompt-file long.txt", "Qwen2.5-0.5B --adapter runs/my/final --chat"]),
    ("serve", ["runs/my --port 8000", "Qwen2.5-0.5B --policy h2o --cache-length 8192"]),
    ("export", ["runs/my --for peft", "runs/my --for merged --out my-model"]),
    ("inspect", ["runs/my", "--evictions log.safetensors --out kept.png"]),
    ("report", ["runs/my", "runs/h2o runs/lastrec --out compared.html"]),
    ("verify", ["my.toml", "--conformance runs/my/final"]),
    ("check", ["my.toml", "my.toml --set kv_cache.cache_length=4096"]),
    ("data", ["my.toml --show 3", "my.toml --dump rows.jsonl"]),
    ("plan", ["my.toml", "my.toml --tokens 100000 --device-memory 80GB"]),
    ("bench", ["my.toml --tokens 32768 --steps 3", "my.toml --tokens 32768 --steps 3 --random-weights"]),
    ("doctor", ["", "--json"]),
    ("init-model", ["--config config.json --out model", "--config config.json --tokenizer-from a.txt b.txt --out model"]),
    ("completions", ["bash > ~/.local/share/bash-completion/completions/kvtune", "zsh > ~/.zfunc/_kvtune"]),
    ("man", ["man", "~/.local/share/man/man1"]),
];

/// All verbs with their examples.
pub(super) fn command() -> Command {
    EXAMPLES.iter().fold(Arguments::command(), |command, (verb, lines)| {
        let lines = lines.map(|line| format!("  kvtune {verb} {line}").trim_end().to_owned());
        command.mut_subcommand(verb, |of_verb| of_verb.after_help(format!("Examples:\n{}", lines.join("\n"))))
    })
}

/// Reads arguments, the first of which is the program's name.
pub(super) fn parse(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Arguments, clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(arguments)?;
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_has_two_examples_that_are_read() {
        let verbs: Vec<String> = Arguments::command().get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
        assert_eq!(verbs.len(), EXAMPLES.len(), "{verbs:?}");
        for (verb, lines) in EXAMPLES {
            assert!(verbs.iter().any(|name| name == verb), "{verb}");
            for line in lines {
                let line = line.split(" > ").next().unwrap_or_default();
                let words = ["kvtune", verb].into_iter().chain(line.split_whitespace());
                assert!(parse(words.clone()).is_ok(), "{:?}", words.collect::<Vec<_>>());
            }
        }
    }
}
