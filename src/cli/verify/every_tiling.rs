//! `kvtune verify --every-tiling`: one reference, and beside it the gradient in every shape of cells, with every store and cache.

use std::time::Instant;

use serde_json::{Value, json};

use super::proof::{self, proved, tested, written};
use crate::engine::Engine;
use crate::recipe::{Recipe, StoreRecipe};
use crate::report::console;
use crate::report::table::Table;
use crate::units::{Bytes, Fault, Seconds};
use crate::verify::{Proofs, TilingProof, Verdict, every_tiling};

struct Proved {
    recipe: Recipe,
    is_own: bool,
    /// In which keys it differs from the recipe; of the recipe's own, which stores round.
    keys: String,
    found: TilingProof,
    verdict: Verdict,
}

/// Proves the recipe's own tiling and all others, prints a line for each, and fails where one is not what it should be.
pub(super) fn prove(
    recipe: &Recipe,
    engine_of: impl Fn(&Recipe) -> Result<Engine, Fault>,
    proofs: &mut Proofs<'_>,
) -> Result<(), Fault> {
    let own = engine_of(recipe)?;
    let plan = own.settings().plan(proofs.batch, proofs.context.chunk_sizes)?;
    let trained = proofs.model.first_trained_layer()..proofs.model.config().num_layers();
    let tilings = every_tiling(recipe, &trained, own.settings(), &plan);
    let (count, tolerance) = (tilings.len(), proofs.tolerance());
    let mut all: Vec<Proved> = Vec::with_capacity(count);
    for (index, other) in tilings.into_iter().enumerate() {
        let (began, is_own) = (Instant::now(), index == 0);
        let engine = engine_of(&other)?;
        let keys = if is_own { written(&engine.settings().inexact_stores(trained.start)) } else { differences(recipe, &other) };
        let found = proofs.prove(&engine)?;
        let one = Proved { recipe: other, is_own, keys, verdict: found.verdict(tolerance), found };
        if console::speech().is_json {
            console::result(&one.line().to_string())?;
        } else {
            let time = Seconds(began.elapsed().as_secs_f64());
            console::note(&format!("tiling {} of {count}: {}, {time}", index + 1, one.verdict.name()));
        }
        all.push(one);
    }
    let verdicts: Vec<Verdict> = all.iter().map(|one| one.verdict).collect();
    let bad = Verdict::first_bad(&verdicts).map(|at| &all[at]);
    tell(&all, bad, proofs)?;
    bad.map_or(Ok(()), |one| proof::check(proofs, &one.found, &one.keys))
}

fn differences(recipe: &Recipe, other: &Recipe) -> String {
    let all = recipe.differences(other);
    all.iter().map(|difference| format!("`{} = {}`", difference.key, difference.after)).collect::<Vec<_>>().join(", ")
}

/// The table, and what holds for all, of which the recipe's own is the first.
fn tell(all: &[Proved], bad: Option<&Proved>, proofs: &Proofs<'_>) -> Result<(), Fault> {
    let (of, count) = (&all[0].found.comparison, all.len());
    let exact: Vec<&TilingProof> = all.iter().map(|one| &one.found).filter(|found| found.bound.is_none()).collect();
    let worst = exact.iter().map(|found| found.comparison.worst()).fold(0.0, f64::max);
    let apart = exact.iter().filter_map(|found| found.apart).fold(0.0, f64::max);
    if console::speech().is_json {
        let verdict = bad.map_or(Verdict::Proved, |one| one.verdict).name();
        let more = json!({
            "verdict": verdict, "tilings": count, "exact": exact.len(), "relative_error": worst, "from_first": apart,
        });
        return proof::tell_whole(proofs, of, &more);
    }
    console::table(&Table::of_named(all.iter().map(Proved::row)))?;
    console::result(&format!(
        "{}\n{count} tilings, {} of them exact: worst relative error {worst:.2e}, from the first exact one {apart:.2e} (tolerance \
         {:.0e}), {}",
        proof::words(proofs, of),
        exact.len(),
        proofs.tolerance(),
        tested(of)
    ))?;
    if bad.is_none() {
        let rounding = if exact.len() < count { "; near enough where stores round" } else { "" };
        console::result(&format!("{}{rounding}", proved(of)))?;
    }
    Ok(())
}

impl Proved {
    fn row(&self) -> Vec<(&'static str, String)> {
        let (found, Recipe { kv_cache, grad, .. }) = (&self.found, &self.recipe);
        let (layers, chunks) = found.largest_cell;
        let store = |recipe: StoreRecipe, most: Bytes| if most > Bytes(0) { recipe.to_string() } else { "–".to_owned() };
        let (cosine, _) = found.comparison.whole();
        let [error, cosine] = match found.bound {
            None => [format!("{:.2e}", found.comparison.worst()), "–".to_owned()],
            Some(bound) => {
                [format!("{:.3} %", 100.0 * found.relative_error()), format!("{cosine:.6} (at least {})", bound.smallest_cosine)]
            }
        };
        vec![
            ("layers × chunks", format!("{layers} × {chunks}{}", if self.is_own { " (the recipe's)" } else { "" })),
            ("cells", format!("{} × {}", found.cells.0, found.cells.1)),
            ("graphs kept", found.kept.to_string()),
            ("layer checkpoints", store(grad.layer_checkpoints, found.layer_checkpoints)),
            ("undo log", store(grad.undo_log, found.undo_log)),
            ("attention outputs", grad.attention_outputs.name().to_owned()),
            ("caches", format!("{}{}", kv_cache.storage, if kv_cache.cpu_offload { ", on the host" } else { "" })),
            ("head", if found.is_head_in_cells { "cells" } else { "forward phase" }.to_owned()),
            ("relative error", error),
            ("from the first", found.apart.map_or("–".to_owned(), |apart| format!("{apart:.2e}"))),
            ("cosine", cosine),
            ("verdict", self.verdict.name().to_owned()),
        ]
    }

    fn line(&self) -> Value {
        let (found, Recipe { kv_cache, grad, .. }) = (&self.found, &self.recipe);
        let store = |recipe: StoreRecipe, most: Bytes| json!({ "form": recipe.form.name(), "place": recipe.place.name(), "peak_bytes": most.0 });
        json!({
            "kind": "tiling", "is_own": self.is_own, "layers_per_cell": found.largest_cell.0, "chunks_per_cell": found.largest_cell.1,
            "layer_bands": found.cells.0, "columns": found.cells.1, "kept_cells": found.kept,
            "layer_checkpoints": store(grad.layer_checkpoints, found.layer_checkpoints),
            "undo_log": store(grad.undo_log, found.undo_log), "attention_outputs": grad.attention_outputs.name(),
            "storage": kv_cache.storage.name(), "cpu_offload": kv_cache.cpu_offload,
            "head": if found.is_head_in_cells { "cells" } else { "forward" },
            "relative_error": found.relative_error(), "from_first": found.apart, "cosine": found.comparison.whole().0,
            "verdict": self.verdict.name(),
        })
    }
}
