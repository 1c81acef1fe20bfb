//! What makes the host wait for the device inside the rows of a step.

use kvtune::engine::{Event, MemoryByPart, Observer};
use kvtune::native::{SyncCounter, Syncs};

use super::case::Case;

/// Counts between the first event of a step and its last.
struct Counting {
    counter: SyncCounter,
    first: Option<Syncs>,
    last: Syncs,
    events: usize,
}

impl Observer for Counting {
    fn observe(&mut self, _event: Event, _: &dyn Fn() -> MemoryByPart) {
        self.last = self.counter.read();
        self.first.get_or_insert(self.last);
        self.events += 1;
    }
}

/// What lets the host wait inside the rows of a step.
pub fn syncs_of_step(case: &Case) -> Syncs {
    let model = super::model(case);
    let (engine, batch) = (super::engine(case, &model), super::batch(case));
    let counter = SyncCounter::start().unwrap();
    let mut counting = Counting { counter, first: None, last: Syncs::default(), events: 0 };
    engine.gradients(&model, &batch, super::context(case), &mut counting).unwrap();
    assert!(counting.events > 10, "{case:?}");
    counting.last.since(counting.first.unwrap())
}
