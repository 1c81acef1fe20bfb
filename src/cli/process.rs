//! The process: arguments in, words and an exit code out. A panic that no guard has caught ends as an error, too, and none is printed raw.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::Mutex;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches, Parser};
use signal_hook::low_level::exit;

use super::options::{Format, SharedOptions};
use super::{Verb, launch, limits, world};
use crate::engine::error_of_panic;
use crate::native::cuda::missing_kernels;
use crate::native::locked;
use crate::recipe::{check_policies_by, know_formats};
use crate::report::console::{self, Speech};
use crate::units::{Fault, FaultKind};
use crate::{cache, data};

/// Variables of profilers that write what they have seen when the process ends in the ordinary way: CUPTI's, of Nsight, and LLVM's.
const PROFILERS: [&str; 3] = ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "LLVM_PROFILE_FILE"];

const EXAMPLES: &str = include_str!("../../docs/reference/examples.txt");

/// The argument with which the binary renders chat templates for another process of it.
const RENDERER: &str = "render-chat-templates";

/// Fine-tunes language models on very long sequences, with the KV-cache policy in the loop.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
    /// The verb as its help names it.
    #[arg(skip)]
    verb_name: String,
    #[command(flatten)]
    options: SharedOptions,
}

pub fn main() -> ! {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == RENDERER) {
        exit(i32::from(data::become_renderer().is_err()));
    }
    data::render_in_children_of("/proc/self/exe", RENDERER);
    check_policies_by(|recipe| cache::of_any_length(recipe).map(drop));
    know_formats(data::formats());
    launch::follow_launcher();
    let code = parse(std::env::args_os()).map_or_else(|error| refused(&error), |arguments| code_of(&arguments));
    let _ = io::stdout().flush();
    if PROFILERS.iter().any(|name| std::env::var_os(name).is_some()) {
        std::process::exit(code);
    }
    // At once: destructors of libtorch's thousands of operations would take as long as some verbs do, and everything of ours is gone.
    exit(code)
}

/// Says what is wrong with the arguments, or what was asked of the parser itself, as `--help`; returns the exit code.
fn refused(error: &clap::Error) -> i32 {
    // To a terminal that is gone nothing can be said.
    let _ = error.print();
    let is_empty = matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(text)) if text.is_empty());
    if error.kind() == ErrorKind::InvalidValue && is_empty {
        console::note("\nhint: an empty text names nothing: write a value, or leave the argument out");
    }
    if error.kind() == ErrorKind::UnknownArgument {
        console::note(
            "hint: keys of a recipe are set by `--set`, as `--set optimizer.learning_rate=1e-4`, where a command has it",
        );
    }
    error.exit_code()
}

/// Does what is asked, and returns the exit code.
fn code_of(Arguments { verb, verb_name, options }: &Arguments) -> i32 {
    silence_panics();
    let done = caught(|| {
        limits::check()?;
        console::speak(Speech { is_quiet: options.quiet, is_verbose: options.verbose, is_json: options.format == Format::Json });
        if !launch::is_for_ranks(verb_name, &parser()) {
            world::refuse_further_ranks(verb_name)?;
        }
        verb.run(options, parser)
    });
    // What of it was slower than it need be, where nobody has said so yet.
    for line in missing_kernels() {
        console::note(&line);
    }
    match done {
        Ok(code) => code,
        Err(error) => {
            console::error(&error);
            for error in error.further() {
                console::note("");
                console::error(error);
            }
            error.exit() as i32
        }
    }
}

/// The parser of arguments, with two examples below the help of each verb.
fn parser() -> Command {
    // A negative number is a wrong value, not an argument that does not exist.
    Arguments::command().allow_negative_numbers(true).mut_subcommands(|verb| {
        let lines = EXAMPLES
            .lines()
            .filter(|line| line.split(' ').next() == Some(verb.get_name()))
            .map(|line| format!("\n  kvtune {line}"));
        let help = format!("Examples:{}", lines.collect::<String>());
        verb.allow_negative_numbers(true).after_help(help)
    })
}

/// Reads arguments, the first of which is the program's name.
fn parse(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Arguments, clap::Error> {
    let mut parser = parser();
    let matches = parser.try_get_matches_from_mut(arguments)?;
    let arguments = Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut parser))?;
    Ok(Arguments { verb_name: matches.subcommand_name().unwrap_or_default().to_owned(), ..arguments })
}

/// Where the latest panic of any thread happened; printed only if no guard catches it.
static LATEST: Mutex<Option<String>> = Mutex::new(None);

/// Keeps panics off the terminal. A message is not lost: guards and [`caught`] make errors of it.
fn silence_panics() {
    set_hook(Box::new(|info| {
        let mut place = info.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
        let backtrace = Backtrace::capture();
        if backtrace.status() == BacktraceStatus::Captured {
            place = format!("{place}\n{backtrace}");
        }
        *locked(&LATEST) = Some(place);
    }));
}

/// Runs a verb; a panic that no guard caught becomes an error, with its place.
fn caught<T>(verb: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(verb)).unwrap_or_else(|panic| {
        let place = locked(&LATEST).take().unwrap_or_default();
        let error = error_of_panic(&*panic);
        Err(if error.kind() == FaultKind::Torch {
            let hint = "please report it with the command and these lines; saved checkpoints are intact";
            error
                .map_message(|said| format!("kvtune has a defect: {}\n  --> {place}", said.trim_start_matches("libtorch: ")))
                .with_hint(hint)
        } else {
            error
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Exit;

    #[test]
    fn every_verb_has_two_examples_that_are_read() {
        for verb in parser().get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert_eq!(help.lines().count(), 3, "{}: {help}", verb.get_name());
        }
        for line in EXAMPLES.lines() {
            let words = line.split(" > ").next().unwrap_or_default().split_whitespace();
            assert!(parse(["kvtune"].into_iter().chain(words)).is_ok(), "{line}");
        }
    }

    #[test]
    fn a_panic_is_an_error_that_says_what_it_is() {
        let defect = caught::<()>(|| panic!("index 3 of 2")).unwrap_err();
        assert!(defect.to_string().starts_with("kvtune has a defect: index 3 of 2\n  --> "), "{defect}");
        assert_eq!(defect.exit(), Exit::Failed);
        let memory = caught::<()>(|| panic!("CUDA out of memory. Tried to allocate 2 GiB")).unwrap_err();
        assert_eq!(memory.exit(), Exit::Memory, "{memory}");
        assert!(matches!(caught(|| Ok(5)), Ok(5)));
    }
}
