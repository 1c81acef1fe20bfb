//! What makes the host wait for the device inside the rows of a step.

use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;

use kvtune::engine::{Event, MemoryByPart, Observer};

use super::case::Case;

// `waits.cpp`, which is built with the shim.
#[expect(unsafe_code, reason = "functions that any thread may call at any time")]
unsafe extern "C" {
    safe fn kvtune_waits_start() -> c_int;
    safe fn kvtune_waits_read(index: usize) -> *const c_char;
    safe fn kvtune_waits_stop();
}

/// Notes of the thread that started it, and of the backwards that this thread runs, until it is dropped there.
pub struct SyncNotes(PhantomData<*const ()>);

impl SyncNotes {
    pub fn start() -> Self {
        assert_eq!(kvtune_waits_start(), 0, "this thread takes notes already, or libtorch takes none");
        Self(PhantomData)
    }

    /// What there was so far, in words: operations whose result the host must know, which count on any device, also on the CPU, where they
    /// cost nothing; and what happens between the host and a device only. CUDA's own count has some of these once more.
    #[expect(clippy::unused_self, reason = "there are notes as long as it lives")]
    pub fn read(&self) -> Vec<String> {
        let notes = (0..).map(|index| kvtune_waits_read(index)).take_while(|note| !note.is_null());
        #[expect(unsafe_code, reason = "texts of the program's own, that end with a zero")]
        // SAFETY: a literal.
        notes.map(|note| unsafe { CStr::from_ptr(note) }.to_string_lossy().into_owned()).collect()
    }
}

impl Drop for SyncNotes {
    fn drop(&mut self) {
        kvtune_waits_stop();
    }
}

/// What is noted between the first event of a step and its last.
pub struct NotesOfStep {
    notes: SyncNotes,
    before: Option<usize>,
    all: Vec<String>,
    events: usize,
}

impl NotesOfStep {
    pub fn begin() -> Self {
        Self { notes: SyncNotes::start(), before: None, all: Vec::new(), events: 0 }
    }

    pub fn syncs(mut self) -> Vec<String> {
        self.all.split_off(self.before.unwrap())
    }
}

impl Observer for NotesOfStep {
    fn observe(&mut self, _event: Event, _: &dyn Fn() -> MemoryByPart) {
        self.all = self.notes.read();
        self.before.get_or_insert(self.all.len());
        self.events += 1;
    }
}

/// What lets the host wait inside the rows of a step.
pub fn syncs_of_step(case: &Case) -> Vec<String> {
    let model = super::model(case);
    let (engine, batch) = (super::engine(case, &model), super::batch(case));
    let mut notes = NotesOfStep::begin();
    engine.gradients(&model, &batch, super::context(case), &mut notes).unwrap();
    assert!(notes.events > 10, "{case:?}");
    notes.syncs()
}
