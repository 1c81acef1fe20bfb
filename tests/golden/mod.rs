//! The engine beside another program: what it evicted, its logits, its loss and its gradients, case by case as it wrote them down.

mod by_hand;
mod chunking;
mod dense;
mod families;
pub(crate) mod fixture;
mod initial_part;
mod merged;
mod quantised;
mod scores;

use fixture::{BY_MASK, Golden, ITS_OWN, check, logits, model};
use kvtune::engine::{Engine, NoObserver};
use tch::Device;

const CPU: Device = Device::Cpu;

#[test]
fn dense() {
    check("dense96", ITS_OWN, CPU);
}

/// Quantised buffers are for orientation: the other program quantises again and again, column by column, on a grid of its own, and
/// its backward takes the entries for exact; here an entry is quantised once, after its own chunk (a piece of the prefill span being
/// one), in both phases. With the same entries evicted, losses agree to 1%.
///
/// lastrec evicts the same by itself. qh2o ranks entries by what rounding costs them, and another grid rounds otherwise: it evicts
/// others, and its own loss is another model's. So it follows the choices of the other program here.
#[test]
fn quantised() {
    for name in ["lastrec-q8", "qh2o-q8"] {
        let (golden, model) = (Golden::read(name), model(CPU));
        let (engine, batch) = (golden.engine(&model), golden.batch());
        let (_, own) = logits(&engine, &model, &batch);
        let log = golden.choices(&engine, &batch);
        golden.check_positions(&log);
        let apart = |engine: &Engine| {
            let sequences = engine.losses(&model, &batch, &mut NoObserver).unwrap();
            let loss = sequences.iter().map(|r| r.loss_sum).sum::<f64>() / golden.tensors["targets"].numel() as f64;
            loss / golden.number("loss") - 1.0
        };
        let by_itself = apart(&engine);
        if name == "lastrec-q8" {
            golden.check_positions(&own);
        }
        let following = apart(&golden.engine(&model).following(log));
        println!("{name}: loss {:.3}% apart with the same choices, {:.3}% with its own", 100.0 * following, 100.0 * by_itself);
        assert!(following.abs() <= 0.01, "{name}: {following}");
    }
}

#[test]
fn smart_lastrec() {
    check("smart-lastrec-prefix1-frac75", ITS_OWN, CPU);
    // Its own backward gave up: the ranges of its two phases differ.
    check("smart-lastrec-prefix0-frac75", BY_MASK, CPU);
}

#[test]
fn lastrec() {
    for name in ["lastrec-g0", "lastrec-g4", "lastrec-gdefault", "lastrec-g4-tail20"] {
        check(name, ITS_OWN, CPU);
    }
}

#[test]
fn h2o() {
    for name in ["h2o", "h2o-keep0", "h2o-topk", "h2o-lpc2-cpcm2", "h2o-norm", "h2o-tail20"] {
        check(name, ITS_OWN, CPU);
    }
}

#[test]
fn h2o_by_value_norm_and_as_published() {
    for name in ["h2o-vlen", "h2o-orig"] {
        check(name, ITS_OWN, CPU);
    }
}

#[test]
fn h2o_with_grace() {
    for name in ["h2o-grace4-fixed", "h2o-grace12-fixed"] {
        check(name, ITS_OWN, CPU);
    }
}

#[test]
fn layers_of_different_length() {
    for name in ["lastrec-mixed", "h2o-mixed"] {
        check(name, BY_MASK, CPU);
    }
}

#[test]
fn classification() {
    check("h2o-cls", ITS_OWN, CPU);
}
