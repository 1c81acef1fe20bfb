//! What makes the host wait for the device inside the rows of a step.

use kvtune::engine::{Event, MemoryByPart, Observer};
use kvtune::native::SyncNotes;

use super::case::Case;

/// What is noted between the first event of a step and its last.
pub struct NotesOfStep {
    notes: SyncNotes,
    before: Option<usize>,
    all: Vec<String>,
    events: usize,
}

impl NotesOfStep {
    pub fn begin() -> Self {
        Self { notes: SyncNotes::start().unwrap(), before: None, all: Vec::new(), events: 0 }
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
