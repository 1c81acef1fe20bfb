//! Operations captured as a CUDA graph: whether it computes what they compute, and how much sooner the host is done with it.

use std::time::Instant;

use tch::{Device, Kind, Tensor, no_grad};

use super::check::{DoctorCheck, Promise};
use crate::engine::{EngineError, guarded};
use crate::model::AttendError;
use crate::native::cuda::{GraphError, GraphRecorder, wait};

/// The row's name.
pub(super) const NAME: &str = "CUDA graphs";
/// Pairs of a product and a sum.
const PAIRS: i64 = 16;
/// With the copy at the end.
const OPERATIONS: i64 = 2 * PAIRS + 1;
const SIDE: i64 = 64;
const TIMES: u32 = 20;

/// What came of it.
struct GraphTrial {
    is_right: bool,
    /// Of the host, for all operations.
    one_by_one: f64,
    at_once: f64,
}

/// On the device `cuda:index`.
pub(super) fn check(index: usize) -> DoctorCheck {
    told(guarded(|| no_grad(|| tried(index))))
}

fn told(tried: Result<GraphTrial, EngineError>) -> DoctorCheck {
    let hint = "leave `grad.cuda_graphs = false`; everything else goes without graphs";
    let tried = match tried {
        Ok(tried) => tried,
        Err(error) => {
            let found = error.to_string().lines().next().unwrap_or_default().to_owned();
            // A recipe that does not ask for them goes without.
            return if is_lacking(&error) {
                DoctorCheck::lacking(NAME, found, hint, Promise::Cpu)
            } else {
                DoctorCheck::failed(NAME, found, hint)
            };
        }
    };
    let micro = |seconds: f64| format!("{:.0} µs", seconds * 1e6);
    let (at_once, one_by_one) = (micro(tried.at_once), micro(tried.one_by_one));
    let found = format!("{OPERATIONS} operations launched in {at_once}, one by one in {one_by_one}");
    let figures = [("graph_launch_seconds", tried.at_once), ("operations_launch_seconds", tried.one_by_one)];
    if tried.is_right {
        DoctorCheck::ok(NAME, found).with(&figures)
    } else {
        DoctorCheck::failed(NAME, format!("{found}; other numbers came out"), hint).with(&figures)
    }
}

fn is_lacking(error: &EngineError) -> bool {
    let EngineError::Attend(error) = error else { return false };
    matches!(error.graph(), Some(GraphError::Lacking(_)))
}

fn tried(index: usize) -> Result<GraphTrial, EngineError> {
    let refused = |error: GraphError| AttendError::from(error);
    let recorder = GraphRecorder::new(index).map_err(refused)?;
    let device = Device::Cuda(index);
    let mut x = Tensor::ones([SIDE, SIDE], (Kind::Float, device));
    let mut y = x.zeros_like();
    let one = Tensor::eye(SIDE, (Kind::Float, device));
    let work = |x: &Tensor, y: &mut Tensor| y.copy_(&(0..PAIRS).fold(x.shallow_clone(), |sum, _| sum.matmul(&one) + x));
    let graph = recorder.capture(|| work(&x, &mut y)).map_err(refused)?;
    let expected = |x: f64| Tensor::full([SIDE, SIDE], x * (PAIRS + 1) as f64, (Kind::Float, device));
    let was_right = y.equal(&expected(1.0));
    let _ = x.fill_(3.0);
    graph.replay();
    let is_right = was_right && y.equal(&expected(3.0));
    let timed = |launch: &mut dyn FnMut()| {
        wait(device);
        let begun = Instant::now();
        (0..TIMES).for_each(|_| launch());
        let seconds = begun.elapsed().as_secs_f64() / f64::from(TIMES);
        wait(device);
        seconds
    };
    let at_once = timed(&mut || graph.replay());
    Ok(GraphTrial { is_right, at_once, one_by_one: timed(&mut || work(&x, &mut y)) })
}

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    #[test]
    fn other_numbers_and_no_graphs_are_failures() {
        let tried = |is_right| Ok(GraphTrial { is_right, at_once: 6e-6, one_by_one: 180e-6 });
        assert_eq!(told(tried(true)).found, "33 operations launched in 6 µs, one by one in 180 µs");
        assert_eq!((told(tried(true)).state, told(tried(false)).state), (State::Ok, State::Failed));
        let without = told(Err(EngineError::Torch("operation not permitted\nat".to_owned())));
        assert_eq!((without.state, without.found.as_str()), (State::Failed, "libtorch: operation not permitted"));
    }

    #[test]
    fn without_cudas_half_the_reason_is_told() {
        if tch::Cuda::is_available() {
            eprintln!("skipped: a CUDA device is there");
            return;
        }
        let found = check(0);
        assert_eq!((found.state, found.hint), (State::Missing, None), "{found:?}");
        assert!(found.found.contains("this libtorch has no `_ZN2at4cuda"), "{found:?}");
    }
}
