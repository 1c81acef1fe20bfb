//! A door for crash tests: named places of a save that fail, or kill the process, when the environment asks for it.
//!
//! `KVTUNE_FAILPOINT=file.write=enospc:3` fails the third write with a full disk; `error` is an I/O error, `kill` ends the process
//! at once as SIGKILL does, and `stop` halts it as SIGSTOP does, until somebody sends SIGCONT. The name `any` counts every place,
//! so a loop over n visits all of them.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The environment variable.
pub const VARIABLE: &str = "KVTUNE_FAILPOINT";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailpointAction {
    Kill,
    Stop,
    Error,
    NoSpace,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Failpoint {
    name: String,
    action: FailpointAction,
    nth: u64,
}

impl Failpoint {
    fn parse(text: &str) -> Option<Self> {
        let (name, rest) = text.split_once('=')?;
        let (action, nth) = rest.split_once(':').unwrap_or((rest, "1"));
        let action = match action {
            "kill" => FailpointAction::Kill,
            "stop" => FailpointAction::Stop,
            "error" => FailpointAction::Error,
            "enospc" => FailpointAction::NoSpace,
            _ => return None,
        };
        Some(Self { name: name.into(), action, nth: nth.parse().ok()? })
    }

    fn run(&self, name: &str) -> io::Result<()> {
        match self.action {
            FailpointAction::Error => Err(io::Error::other(format!("failpoint `{name}`"))),
            FailpointAction::NoSpace => Err(io::ErrorKind::StorageFull.into()),
            FailpointAction::Stop => Ok(rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?),
            FailpointAction::Kill => {
                // No destructor, no buffer, no signal handler: as a power cut, but that the page cache survives.
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                loop {
                    std::thread::park();
                }
            }
        }
    }
}

/// Passes the place `name`: does nothing unless the environment asked for a failure here.
pub fn pass(name: &str) -> io::Result<()> {
    static PLAN: OnceLock<Option<Result<Failpoint, String>>> = OnceLock::new();
    static PASSED: AtomicU64 = AtomicU64::new(0);
    #[cfg(test)]
    if let Some(result) = tests::pass_in_this_thread(name) {
        return result;
    }
    let read = || std::env::var(VARIABLE).ok().map(|text| Failpoint::parse(&text).ok_or(text));
    match PLAN.get_or_init(read) {
        Some(Err(text)) => {
            Err(io::Error::other(format!("cannot read {VARIABLE}={text}: expected NAME=kill|stop|error|enospc[:n]")))
        }
        Some(Ok(plan)) if plan.name == name || plan.name == "any" => {
            if PASSED.fetch_add(1, Ordering::Relaxed) + 1 == plan.nth {
                plan.run(name)
            } else {
                Ok(())
            }
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static LOCAL: RefCell<Option<(Failpoint, u64)>> = const { RefCell::new(None) };
    }

    /// Runs `body` with a plan for this thread only; returns its result and whether the failpoint was reached.
    pub(crate) fn with<T>(plan: &str, body: impl FnOnce() -> T) -> (T, bool) {
        let plan = Failpoint::parse(plan).unwrap();
        LOCAL.with_borrow_mut(|local| *local = Some((plan, 0)));
        let result = body();
        let (plan, passed) = LOCAL.with_borrow_mut(Option::take).unwrap();
        (result, passed >= plan.nth)
    }

    pub(super) fn pass_in_this_thread(name: &str) -> Option<io::Result<()>> {
        LOCAL.with_borrow_mut(|local| {
            let (plan, passed) = local.as_mut()?;
            if plan.name != name && plan.name != "any" {
                return Some(Ok(()));
            }
            *passed += 1;
            Some(if *passed == plan.nth { plan.run(name) } else { Ok(()) })
        })
    }

    #[test]
    fn plans_are_read_and_the_nth_pass_fails() {
        assert_eq!(Failpoint::parse("a.b=kill"), Some(Failpoint { name: "a.b".into(), action: FailpointAction::Kill, nth: 1 }));
        assert_eq!(Failpoint::parse("a=enospc:7").unwrap().nth, 7);
        for wrong in ["a", "a=burn", "a=kill:x"] {
            assert_eq!(Failpoint::parse(wrong), None, "{wrong}");
        }
        let (results, reached) =
            with("here=enospc:2", || [pass("here"), pass("there"), pass("here"), pass("here")].map(|r| r.is_ok()));
        assert_eq!((results, reached), ([true, true, false, true], true));
        assert_eq!(
            with("any=error:2", || (pass("a").is_ok(), pass("b").unwrap_err().to_string())).0,
            (true, "failpoint `b`".into())
        );
        pass("here").unwrap();
    }
}
