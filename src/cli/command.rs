//! The command line as a whole: the parser of arguments, with two examples below the help of each verb.

use std::ffi::OsString;

use clap::{Command, CommandFactory, FromArgMatches, Parser, ValueEnum};

use super::{Verb, device};

const EXAMPLES: &str = include_str!("examples.txt");

/// Fine-tunes language models on very long sequences, with the KV-cache policy in the loop.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub(super) verb: Verb,
    /// The verb as its help names it.
    #[arg(skip)]
    pub(super) verb_name: String,
    /// Where to compute: `auto`, `cpu`, `cuda` or `cuda:1`.
    #[arg(long, global = true, default_value_t = device::Wanted::Auto, value_name = "DEVICE", value_parser = device::Wanted::parse)]
    pub(super) device: device::Wanted,
    /// CPU threads. Default: one for each CPU that the process may use. Results are bit-identical for the same number.
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) threads: Option<u16>,
    /// How to print results: words and tables, or a JSON object per line.
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub(super) format: Format,
    /// Print only results, warnings and errors.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(super) quiet: bool,
    /// Print more: every training step, and notes each time.
    #[arg(short, long, global = true)]
    pub(super) verbose: bool,
}

impl Arguments {
    /// The options that all commands take, as they were given, for a process that does the work.
    pub(super) fn options(&self) -> Vec<String> {
        let device = (self.device != device::Wanted::Auto).then(|| self.device.to_string());
        let values = [("--device", device), ("--threads", self.threads.map(|count| count.to_string()))];
        let values = values.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
        let flags = [("--format=json", self.format == Format::Json), ("--quiet", self.quiet), ("--verbose", self.verbose)];
        values.chain(flags.iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| (*flag).to_owned())).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    #[value(alias = "table")]
    Text,
    Json,
}

pub(super) fn command() -> Command {
    // A negative number is a wrong value, not an argument that does not exist.
    let command = Arguments::command().allow_negative_numbers(true);
    let verbs: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    verbs.iter().fold(command, |command, verb| {
        let lines = EXAMPLES.lines().filter(|line| line.split(' ').next() == Some(verb)).map(|line| format!("\n  kvtune {line}"));
        command.mut_subcommand(verb, |of_verb| {
            of_verb.allow_negative_numbers(true).after_help(format!("Examples:{}", lines.collect::<String>()))
        })
    })
}

/// Reads arguments, the first of which is the program's name.
pub(super) fn parse(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Arguments, clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(arguments)?;
    let arguments = Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    Ok(Arguments { verb_name: matches.subcommand_name().unwrap_or_default().to_owned(), ..arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_has_two_examples_that_are_read() {
        for verb in command().get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert_eq!(help.lines().count(), 3, "{}: {help}", verb.get_name());
        }
        for line in EXAMPLES.lines() {
            let words = line.split(" > ").next().unwrap_or_default().split_whitespace();
            assert!(parse(["kvtune"].into_iter().chain(words)).is_ok(), "{line}");
        }
    }
}
