//! The command line as a whole: the parser of arguments, with two examples below the help of each verb.

use std::ffi::OsString;

use clap::{Command, CommandFactory, FromArgMatches};

use super::Arguments;

/// Two lines for each verb.
const EXAMPLES: &str = include_str!("examples.txt");

/// All verbs with their examples.
pub(super) fn command() -> Command {
    let command = Arguments::command();
    let verbs: Vec<String> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    verbs.iter().fold(command, |command, verb| {
        let lines = EXAMPLES.lines().filter(|line| line.split(' ').next() == Some(verb)).map(|line| format!("\n  kvtune {line}"));
        command.mut_subcommand(verb, |of_verb| of_verb.after_help(format!("Examples:{}", lines.collect::<String>())))
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
