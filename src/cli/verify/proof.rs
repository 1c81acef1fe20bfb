//! What `kvtune verify` proves, and what it says of a proof.

use serde_json::{Value, json};
use tch::Device;

use crate::data::{Batch, Dataset};
use crate::engine::MicroBatchContext;
use crate::model::Model;
use crate::recipe::{Dtype, Recipe, StoreForm};
use crate::report::console;
use crate::report::table::Table;
use crate::train;
use crate::units::{Exit, Fault, StepKey, counted};
use crate::verify::{Comparison, ErrorBound, MatrixError, Proofs, TilingProof, Verdict};

/// What a batch contributes, without dropout, as it would alone; chunks are drawn as in the first step of training.
pub(super) fn context(recipe: &Recipe, batch: &Batch) -> MicroBatchContext {
    let loss_mean = recipe.train.loss_mean;
    MicroBatchContext {
        weight: 1.0 / batch.num_losses(loss_mean).max(1) as f64,
        loss_mean,
        router_weight: recipe.train.router_aux_loss_coef,
        dropout: None,
        chunk_sizes: Some(StepKey { seed: recipe.train.seed, step: 0 }),
    }
}

/// Prints what was found matrix by matrix, and fails beyond the tolerance. `stores` are those that round, by their keys.
pub(super) fn tell(proofs: &Proofs<'_>, found: &TilingProof, stores: &[(&'static str, StoreForm)]) -> Result<(), Fault> {
    let (of, verdict) = (&found.comparison, found.verdict(proofs.tolerance()));
    if console::speech().is_json {
        of.matrices.iter().try_for_each(|m| console::result(&line_of(m).to_string()))?;
        let (error, (cosine, _)) = (found.relative_error(), of.whole());
        tell_whole(proofs, of, &json!({ "verdict": verdict.name(), "relative_error": error, "cosine": cosine }))?;
    } else {
        console::table(&table(of))?;
        match found.bound {
            Some(bound) => tell_nearness(of, stores, bound)?,
            None => console::result(&format!(
                "{}\nworst relative error {:.2e} (tolerance {:.0e}), {}",
                words(proofs, of),
                found.relative_error(),
                proofs.tolerance(),
                tested(of)
            ))?,
        }
        if verdict == Verdict::Proved {
            console::result(proved(of))?;
        }
    }
    check(proofs, found, &written(stores))
}

/// Fails where the gradient is not what it should be; `keys` say in which tiling.
pub(super) fn check(proofs: &Proofs<'_>, found: &TilingProof, keys: &str) -> Result<(), Fault> {
    let tolerance = proofs.tolerance();
    let (message, hint) = match (found.verdict(tolerance), found.bound) {
        (Verdict::OtherChoices, _) => (
            "other entries are evicted than in the recipe's own tiling".to_owned(),
            "in f64 this is a defect of kvtune: please report it; in f32 rounding may decide between two entries: write the choices \
             with `--dump`, and follow them with `--replay-log`",
        ),
        (Verdict::Disproved, _) => {
            let worst = found.relative_error();
            let message = format!("the gradients differ: the worst relative error is {worst:.2e}, the tolerance {tolerance:.0e}");
            (message, "this is a defect of kvtune: please report it with the table above")
        }
        (Verdict::TooCoarse, Some(bound)) => {
            let (cosine, smallest) = (found.comparison.whole().0, bound.smallest_cosine);
            let message = format!("the gradient has the cosine {cosine:.6} with the exact one, expected at least {smallest}");
            (message, "this is too coarse for the model and its data: keep more, `\"plain\"` is exact")
        }
        _ => return Ok(()),
    };
    let with = if keys.is_empty() { String::new() } else { format!("with {keys} ") };
    Err(Fault::new(Exit::Failed, with + &message).with_hint(hint))
}

/// `2 samples, 80 tokens, in f64: loss …, reference …`.
pub(super) fn words(proofs: &Proofs<'_>, of: &Comparison) -> String {
    let (sequences, tokens) = (counted(proofs.batch.sequences.len(), "sample"), counted(proofs.batch.num_tokens(), "token"));
    format!("{sequences}, {tokens}, in {}: loss {:.9}, reference {:.9}", proofs.dtype(), of.loss, of.reference_loss)
}

/// The last line in JSON, with further keys.
pub(super) fn tell_whole(proofs: &Proofs<'_>, of: &Comparison, more: &Value) -> Result<(), Fault> {
    let untested = of.untested().len();
    let mut line = json!({
        "kind": "proof", "samples": proofs.batch.sequences.len(), "tokens": proofs.batch.num_tokens(), "dtype": proofs.dtype().to_string(),
        "tolerance": proofs.tolerance(), "loss": of.loss, "reference_loss": of.reference_loss,
        "tested": of.matrices.len() - untested, "untested": untested,
    });
    if let (Some(line), Some(more)) = (line.as_object_mut(), more.as_object()) {
        line.extend(more.clone());
    }
    console::result(&line.to_string())
}

/// More samples than this in one dumped batch must be asked for.
const MAX_DUMPED: usize = 64;

/// The first samples of a file: as many as were asked for, all of a dump, or else `default`.
pub(super) fn batch(data: &Dataset, samples: Option<usize>, is_dumped: bool, default: usize) -> Result<Batch, Fault> {
    let default = if is_dumped { data.len() } else { default };
    if samples.is_none() && default > MAX_DUMPED {
        let message = format!("the file has {default} samples, which would be dumped as one batch");
        return Err(Fault::usage(message, "say how many with `--samples`"));
    }
    let count = samples.unwrap_or(default).min(data.len());
    data.batch(&(0..count).collect::<Vec<_>>())
}

/// The recipe's model in `dtype`, with gradients that are not zero.
pub(super) fn proof_model(recipe: &Recipe, dtype: Dtype, device: Device) -> Result<Model, Fault> {
    let mut recipe = recipe.clone();
    recipe.model.dtype = dtype;
    let model = train::model(&recipe, device, false)?;
    train::draw_new_b(&recipe, &model);
    Ok(model)
}

/// Stores that round, as a recipe has them.
pub(super) fn written(stores: &[(&'static str, StoreForm)]) -> String {
    let written: Vec<String> = stores.iter().map(|(key, form)| format!("`{key} = \"{form}\"`")).collect();
    written.join(", ")
}

/// `21 matrices tested, 0 untested`.
pub(super) fn tested(of: &Comparison) -> String {
    let untested = of.untested().len();
    format!("{} matrices tested, {untested} untested", of.matrices.len() - untested)
}

pub(super) fn proved(of: &Comparison) -> &'static str {
    if of.untested().is_empty() { "proved" } else { "proved, except for the untested matrices" }
}

/// Where stores round the gradient must point the same way. How long the difference is depends on the model: it is told beside the tests' models.
fn tell_nearness(of: &Comparison, stores: &[(&'static str, StoreForm)], bound: ErrorBound) -> Result<(), Fault> {
    let (cosine, error) = of.whole();
    let ErrorBound { smallest_cosine, largest_error } = bound;
    let beside = if error <= largest_error { "at most" } else { "more than the" };
    console::result(&format!(
        "{}: cosine of the whole gradient {cosine:.6} (at least {smallest_cosine}), relative error {:.3} % ({beside} {:.1} %, as \
         the models of the tests have it)",
        written(stores),
        100.0 * error,
        100.0 * largest_error
    ))?;
    if cosine >= smallest_cosine {
        let plain: Vec<String> = stores.iter().map(|(key, _)| format!("--set {key}=plain")).collect();
        console::result(&format!("near enough; for a proof to rounding, verify with `{}`", plain.join(" ")))?;
    }
    Ok(())
}

fn table(of: &Comparison) -> Table {
    let mut table = Table::new(&["matrix", "|reference|", "relative error", "cosine"]);
    for m in &of.matrices {
        let (error, cosine) = if m.reference_norm > 0.0 {
            (format!("{:.2e}", m.relative_error), format!("{:.9}", m.cosine))
        } else {
            ("untested".to_owned(), "–".to_owned())
        };
        table.row(&[&m.name, &format!("{:.3e}", m.reference_norm), &error, &cosine]);
    }
    table
}

/// A matrix whose reference is zero has neither error nor cosine.
fn line_of(m: &MatrixError) -> Value {
    let if_tested = |value: f64| (m.reference_norm > 0.0).then_some(value);
    json!({
        "kind": "matrix", "name": m.name, "reference_norm": m.reference_norm, "norm": m.norm,
        "relative_error": if_tested(m.relative_error), "cosine": if_tested(m.cosine),
    })
}
