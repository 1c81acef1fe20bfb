//! A device with graphs, simulated on the CPU: what a graph writes is of no use before it runs, and lies where it has lain before.

use std::cell::Cell;

use tch::Tensor;

thread_local! {
    static REPLAYS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Runs `body`, a step for example, as on a device that has graphs; also how many were replayed.
pub(crate) fn while_graphs_are_simulated<T>(body: impl FnOnce() -> T) -> (T, usize) {
    REPLAYS.set(Some(0));
    let result = body();
    (result, REPLAYS.take().unwrap_or(0))
}

pub(super) fn is_on() -> bool {
    REPLAYS.get().is_some()
}

pub(super) fn count_replay() {
    REPLAYS.set(REPLAYS.get().map(|count| count + 1));
}

/// Spoils the results of a graph that is about to write them again: whoever still reads those of an earlier column, or of another layer,
/// gets what is no number.
pub(super) fn spoil(results: &mut [Tensor]) {
    for result in results {
        let _ = result.fill_(f64::NAN);
    }
}
