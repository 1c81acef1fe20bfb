//! A door for crash tests: operations on the disk, and other places of a run, that fail, or kill the process, when the environment asks for it.
//!
//! `KVTUNE_FAILPOINT=file.write=enospc:3` fails the third write of a file with a full disk; `eio` and `edquot` are an error of the disk and a
//! quota, `eintr` a signal that interrupts the call, `short` a write that takes a part only, `kill` ends the process at once as SIGKILL
//! does, `stop` halts it as SIGSTOP does, until somebody sends SIGCONT, and `hang` holds this thread alone for ever, as a disk does that
//! answers no more. With `:3+` all from the third on fail. The name `any` counts every place and `file.any` every one of files, so a loop
//! over n visits all of them. A release has no such door: it looks at no variable.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

pub const VARIABLE: &str = "KVTUNE_FAILPOINT";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailpointAction {
    Kill,
    Stop,
    Hang,
    Short,
    Fail(Errno),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failpoint {
    name: String,
    action: FailpointAction,
    nth: u64,
    stays: bool,
}

impl Failpoint {
    fn parse(text: &str) -> Option<Self> {
        let (name, rest) = text.split_once('=')?;
        let (action, nth) = rest.split_once(':').unwrap_or((rest, "1"));
        let action = match action {
            "kill" => FailpointAction::Kill,
            "stop" => FailpointAction::Stop,
            "hang" => FailpointAction::Hang,
            "short" => FailpointAction::Short,
            "eio" => FailpointAction::Fail(Errno::IO),
            "enospc" => FailpointAction::Fail(Errno::NOSPC),
            "edquot" => FailpointAction::Fail(Errno::DQUOT),
            "eintr" => FailpointAction::Fail(Errno::INTR),
            _ => return None,
        };
        let stays = nth.ends_with('+');
        // What is interrupted every time never ends.
        let endless = stays && action == FailpointAction::Fail(Errno::INTR);
        let nth = nth.strip_suffix('+').unwrap_or(nth).parse().ok().filter(|_| !endless)?;
        Some(Self { name: name.into(), action, nth, stays })
    }

    fn is_named(&self, whose: &str, what: &str) -> bool {
        self.name == "any" || self.name.split_once('.').is_some_and(|(a, b)| a == whose && (b == what || b == "any"))
    }

    fn strikes_at(&self, pass: u64) -> bool {
        pass == self.nth || self.stays && pass > self.nth
    }

    /// Whether it stands for a signal that interrupts a call before it has done anything.
    pub(super) fn interrupts(&self) -> bool {
        self.action == FailpointAction::Fail(Errno::INTR)
    }

    /// Goes wrong: returns the error that was asked for, if it was one.
    pub(super) fn strike(&self) -> io::Result<()> {
        match self.action {
            FailpointAction::Fail(error) => Err(error.into()),
            FailpointAction::Short => Ok(()),
            FailpointAction::Stop => Ok(rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?),
            FailpointAction::Kill => {
                // No destructor, no buffer, no signal handler: as a power cut, but that the page cache survives.
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                park_for_ever()
            }
            FailpointAction::Hang => park_for_ever(),
        }
    }
}

fn park_for_ever() -> ! {
    loop {
        std::thread::park();
    }
}

/// Passes the place `name`, a word, a dot and a word: does nothing unless the environment asked for a failure here.
pub fn pass(name: &str) -> io::Result<()> {
    let (whose, what) = name.split_once('.').unwrap_or((name, ""));
    let fault = reached(whose, what)?;
    // A place is no call that a signal could interrupt.
    fault.filter(|fault| !fault.interrupts()).map_or(Ok(()), |fault| fault.strike())
}

/// What is to go wrong at this place, an operation `what` of `whose` file, if it is now.
pub(super) fn reached(whose: &str, what: &str) -> io::Result<Option<Failpoint>> {
    static PLAN: OnceLock<Option<Result<Failpoint, String>>> = OnceLock::new();
    static PASSED: AtomicU64 = AtomicU64::new(0);
    #[cfg(test)]
    if tests::has_plan() {
        return Ok(tests::reached_in_this_thread(whose, what));
    }
    if !cfg!(debug_assertions) {
        return Ok(None);
    }
    let read = || std::env::var(VARIABLE).ok().map(|text| Failpoint::parse(&text).ok_or(text));
    match PLAN.get_or_init(read) {
        Some(Err(text)) => Err(io::Error::other(format!(
            "cannot read {VARIABLE}={text}: expected NAME=kill|stop|hang|short|eintr|eio|enospc|edquot[:N[+]]"
        ))),
        Some(Ok(plan)) if plan.is_named(whose, what) => {
            Ok(plan.strikes_at(PASSED.fetch_add(1, Ordering::Relaxed) + 1).then(|| plan.clone()))
        }
        _ => Ok(None),
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

    pub(super) fn has_plan() -> bool {
        LOCAL.with_borrow(Option::is_some)
    }

    pub(super) fn reached_in_this_thread(whose: &str, what: &str) -> Option<Failpoint> {
        LOCAL.with_borrow_mut(|local| {
            let (plan, passed) = local.as_mut().filter(|(plan, _)| plan.is_named(whose, what))?;
            *passed += 1;
            plan.strikes_at(*passed).then(|| plan.clone())
        })
    }

    #[test]
    fn plans_are_read_and_the_nth_pass_fails() {
        let plan = |action, nth, stays| Some(Failpoint { name: "a.b".into(), action, nth, stays });
        assert_eq!(Failpoint::parse("a.b=kill"), plan(FailpointAction::Kill, 1, false));
        assert_eq!(Failpoint::parse("a.b=enospc:7+"), plan(FailpointAction::Fail(Errno::NOSPC), 7, true));
        for wrong in ["a", "a=burn", "a=kill:x", "a=eintr:1+", "a=kill:+"] {
            assert_eq!(Failpoint::parse(wrong), None, "{wrong}");
        }
        let pass = |places: [&str; 4]| places.map(|place| super::pass(place).is_ok());
        let (results, reached) = with("a.here=enospc:2", || pass(["a.here", "b.here", "a.here", "a.here"]));
        assert_eq!((results, reached), ([true, true, false, true], true));
        assert_eq!(with("any=eio:2+", || pass(["a.b", "c.d", "e.f", "a.b"])).0, [true, false, false, false]);
        super::pass("a.here").unwrap();
    }
}
