//! A hostile input, what must come of it, and the child that reads it under limits.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::ground::Ground;
use crate::binary::kvtune;
use crate::starter::Fork;

/// How long the CPUs may be at work on a refusal. Most take a tenth of a second.
const LIMIT: Duration = Duration::from_secs(10);
/// When a child is given up that may be waiting for something: a busy machine is given time.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often a child is looked at.
const MOMENT: Duration = Duration::from_millis(10);
/// Resident memory beyond that of `kvtune check` on a sound recipe, in KiB.
const BEYOND: u64 = 512 << 10;
/// The guard of the machine: address space beyond that of the sound one, in KiB. Mapped files count, too.
const ADDRESSES: i64 = 2 << 20;
/// Bytes on standard error.
const MAX_WORDS: usize = 16 << 10;

/// A hostile input.
pub(super) struct Case {
    name: String,
    arguments: Vec<String>,
    code: i32,
    /// Another that is as right.
    or: Option<i32>,
    says: Vec<String>,
    make: Box<dyn Fn(&Ground)>,
    /// Further limits of the process, as arguments of the shell's `ulimit`.
    limits: Vec<String>,
    /// Address space, beside that of a plain check, in KiB.
    addresses: i64,
    /// What may stay although it is refused.
    leaves: Option<String>,
}

impl Case {
    /// By default `kvtune check` refuses with exit code 3 and a hint.
    pub(super) fn new(name: impl Into<String>, make: impl Fn(&Ground) + 'static) -> Self {
        let arguments = ["check", "--recipe", "recipe.toml"].map(str::to_owned).into();
        let limits = Vec::new();
        Self {
            name: name.into(),
            arguments,
            code: 3,
            says: Vec::new(),
            make: Box::new(make),
            limits,
            addresses: ADDRESSES,
            or: None,
            leaves: None,
        }
    }

    /// Spoils something else as well, afterwards.
    pub(super) fn also(mut self, more: impl Fn(&Ground) + 'static) -> Self {
        let first = self.make;
        self.make = Box::new(move |ground| {
            first(ground);
            more(ground);
        });
        self
    }

    pub(super) fn run(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        self
    }

    /// The exit code; an error has its words and a hint, or the parser of the arguments names `--help`.
    pub(super) fn code(mut self, code: i32) -> Self {
        self.code = code;
        self
    }

    pub(super) fn or_code(mut self, code: i32) -> Self {
        self.or = Some(code);
        self
    }

    /// What the words must have: the file, the key, the figure.
    pub(super) fn says(mut self, words: &[&str]) -> Self {
        self.says.extend(words.iter().map(|&word| word.to_owned()));
        self
    }

    /// Less address space than a plain check takes, by so many KiB.
    pub(super) fn short_of(mut self, less: i64) -> Self {
        self.addresses = -less;
        self
    }

    /// Other words in place of some.
    pub(super) fn instead_of(mut self, words: &str, other: &str) -> Self {
        self.says.retain(|word| word != words);
        self.says(&[other])
    }

    pub(super) fn ulimit(mut self, limit: &str) -> Self {
        self.limits.push(limit.to_owned());
        self
    }

    /// The name of a directory that may appear although it is refused.
    pub(super) fn leaves(mut self, name: &str) -> Self {
        self.leaves = Some(name.to_owned());
        self
    }

    pub(super) fn is_named(&self, part: &str) -> bool {
        self.name.contains(part)
    }

    /// What is wrong with how the binary takes it.
    fn fault(&self) -> Option<String> {
        let place = Ground::new();
        (self.make)(&place);
        let before = names(&place.path(""));
        let seen = self.watch(&place);
        let mut faults = self.wrong_words(&seen);
        if seen.took > LIMIT {
            faults.push(format!("it took {:.1} s", seen.took.as_secs_f64()));
        }
        let beyond = seen.resident.saturating_sub(plain().resident);
        if beyond > BEYOND {
            faults.push(format!("it took {} MiB of memory beyond a plain check", beyond >> 10));
        }
        if self.code != 0 {
            let may_stay = self.leaves.as_ref().map(|name| place.path(name).display().to_string());
            let stays = |name: &&String| may_stay.as_ref().is_none_or(|may| !name.starts_with(may));
            let now = names(&place.path(""));
            let new: Vec<_> = now.difference(&before).filter(stays).collect();
            if !new.is_empty() {
                faults.push(format!("it left {new:?}"));
            }
        }
        let words = seen.words.chars().take(600).collect::<String>();
        (!faults.is_empty()).then(|| format!("{}: {}\n    {}", self.name, faults.join("; "), words.replace('\n', "\n    ")))
    }

    fn wrong_words(&self, seen: &Seen) -> Vec<String> {
        let mut faults = Vec::new();
        let found = seen.status.code().map_or_else(|| Err(seen.status.signal()), Ok);
        if found != Ok(self.code) && (self.or.is_none() || found.ok() != self.or) {
            faults.push(format!("expected exit code {}, found {found:?}", self.code));
        }
        if seen.words.len() > MAX_WORDS {
            faults.push(format!("{} bytes of words", seen.words.len()));
        }
        if let Some(strange) = seen.words.chars().find(|c| c.is_control() && !"\n\t".contains(*c)) {
            faults.push(format!("the words have {strange:?}"));
        }
        if self.code != 0 && !(seen.words.contains("error: ") && (seen.words.contains("hint: ") || seen.words.contains("--help")))
        {
            faults.push("no `error:` with a `hint:`".into());
        }
        if seen.words.contains("has a defect") {
            faults.push("a defect".into());
        }
        faults.extend(self.says.iter().filter(|word| !seen.words.contains(&***word)).map(|word| format!("no `{word}`")));
        faults
    }

    fn watch(&self, place: &Ground) -> Seen {
        let addresses = u64::try_from(plain().addresses as i64 + self.addresses).unwrap();
        let command = command(place, &self.arguments);
        // What decides before there is a `main` is seen in a start.
        if self.limits.is_empty() && self.addresses > 0 {
            return watch(|words| Running::Forked(Fork::of(&command, [Path::new("/dev/null"), words], addresses << 10)));
        }
        let mut limits = vec![format!("-v {addresses}")];
        limits.extend(self.limits.iter().cloned());
        watch(|words| Running::Started(start(&command, &limits, words)))
    }
}

/// What a child did.
struct Seen {
    status: ExitStatus,
    words: String,
    took: Duration,
    /// Largest resident memory, in KiB.
    resident: u64,
    /// Largest address space, in KiB.
    addresses: u64,
}

/// `kvtune check` on the sound recipe.
fn plain() -> &'static Seen {
    static PLAIN: OnceLock<Seen> = OnceLock::new();
    PLAIN.get_or_init(|| {
        let place = Ground::new();
        let command = command(&place, &["check", "--recipe", "recipe.toml"].map(str::to_owned));
        let seen = watch(|words| Running::Started(start(&command, &[], words)));
        assert!(seen.status.success() && seen.resident > 0, "{}", seen.words);
        seen
    })
}

fn command(place: &Ground, arguments: &[String]) -> Command {
    let mut command = kvtune();
    command.args(arguments).args(if arguments.iter().any(|a| ["data", "inspect", "score"].contains(&&**a)) {
        &[][..]
    } else {
        &["--device", "cpu"]
    });
    command.env("XDG_CACHE_HOME", place.path("cache")).current_dir(place.path(""));
    command
}

/// The shell sets the limits, and becomes the binary.
fn start(plain: &Command, limits: &[String], words: &Path) -> Child {
    let set = limits.iter().map(|limit| format!("ulimit {limit} && ")).collect::<Vec<_>>().concat();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &format!("{set}exec \"$0\" \"$@\"")]).arg(plain.get_program()).args(plain.get_args());
    command.env_clear().envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(plain.get_current_dir().unwrap());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(words).unwrap()).spawn().unwrap()
}

/// The binary, at work on a case.
enum Running {
    Forked(Fork),
    Started(Child),
}

impl Running {
    fn id(&self) -> u32 {
        match self {
            Self::Forked(fork) => fork.id().cast_unsigned(),
            Self::Started(child) => child.id(),
        }
    }

    /// Waits a moment for its end.
    fn wait(&mut self) -> Option<ExitStatus> {
        match self {
            Self::Forked(fork) => fork.wait(MOMENT),
            Self::Started(child) => {
                std::thread::sleep(MOMENT);
                child.try_wait().unwrap()
            }
        }
    }

    fn kill(&mut self) {
        match self {
            Self::Forked(fork) => fork.kill(),
            Self::Started(child) => child.kill().unwrap(),
        }
    }
}

/// Runs the binary, and looks at its memory until it ends. One that goes on is killed.
fn watch(run: impl FnOnce(&Path) -> Running) -> Seen {
    let words = tempfile::NamedTempFile::new().unwrap();
    let began = Instant::now();
    let mut running = run(words.path());
    let (mut resident, mut addresses, mut took) = (0, 0, Duration::ZERO);
    let status = loop {
        // The largest so far, so that only what comes in the last instants can be missed.
        (resident, addresses) = peaks(running.id()).map_or((resident, addresses), |(r, a)| (resident.max(r), addresses.max(a)));
        took = worked(running.id()).unwrap_or(took);
        if took > LIMIT || began.elapsed() > PATIENCE {
            running.kill();
        }
        if let Some(status) = running.wait() {
            break status;
        }
    };
    let mut said = Vec::new();
    File::open(words.path()).unwrap().take(4 * MAX_WORDS as u64).read_to_end(&mut said).unwrap();
    Seen { status, words: String::from_utf8_lossy(&said).into_owned(), took, resident, addresses }
}

/// How long the CPUs were at work on a process, of `/proc/PID/stat`: two counts of hundredths of a second.
fn worked(id: u32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let counts = stat.rsplit(')').next()?.split(' ').skip(12).take(2).map(|count| count.parse::<u64>().ok());
    Some(Duration::from_millis(10 * counts.sum::<Option<u64>>()?))
}

/// The largest resident memory and address space of the binary so far, in KiB.
fn peaks(id: u32) -> Option<(u64, u64)> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    // For a moment the child is seen with the memory of these tests: who spawns goes on before the child has let go of it.
    if !status.starts_with("Name:\tkvtune\n") {
        return None;
    }
    let of = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok());
    Some((of("VmHWM:")?, of("VmPeak:")?))
}

/// All names below a directory. What is kept of data for the next start may appear.
fn names(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|end| end == "tokens") || path.ends_with("cache") {
            continue;
        }
        found.insert(path.display().to_string().chars().take(300).collect());
        if path.symlink_metadata().unwrap().is_dir() {
            found.extend(names(&path));
        }
    }
    found
}

/// Tries all cases, and fails with everything that is wrong with any.
#[track_caller]
pub(super) fn hold(cases: impl IntoIterator<Item = Case>) {
    let cases: Vec<Case> = cases.into_iter().collect();
    let faults: Vec<String> = cases.iter().filter_map(Case::fault).collect();
    println!("{} of {} hostile inputs are taken as they should be", cases.len() - faults.len(), cases.len());
    assert!(faults.is_empty(), "{} of {} are not taken as they should be:\n{}", faults.len(), cases.len(), faults.join("\n"));
}
