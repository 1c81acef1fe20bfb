//! What may wait for the backward phase in which form and where, as far as a recipe leaves it open: in the order of preference.

use crate::recipe::{AttentionOutputs, BufferKind, GradRecipe, OpenKey, StoreForm, StorePlace, StoreRecipe};

/// Stores in the order of preference.
const LADDER: [(StoreForm, StorePlace); 6] = [
    (StoreForm::Plain, StorePlace::Memory),
    (StoreForm::Plain, StorePlace::File),
    (StoreForm::Int8, StorePlace::Memory),
    (StoreForm::Int8, StorePlace::File),
    (StoreForm::Int4, StorePlace::Memory),
    (StoreForm::Int4, StorePlace::File),
];

/// What may become of attention's outputs beside these stores: beside one that rounds they are computed again.
pub(super) fn outputs(grad: &GradRecipe, stores: [StoreRecipe; 2]) -> &'static [AttentionOutputs] {
    const RECOMPUTE: &[AttentionOutputs] = &[AttentionOutputs::Recompute];
    let round = stores.iter().any(|store| store.form != StoreForm::Plain);
    match grad.attention_outputs {
        _ if grad.is_open(OpenKey::AttentionOutputs) && !round => AttentionOutputs::ALL,
        AttentionOutputs::Keep if !grad.is_open(OpenKey::AttentionOutputs) => &[AttentionOutputs::Keep],
        _ => RECOMPUTE,
    }
}

/// Pairs of stores that the open keys allow, the exact ones first, then by how often they go to a file.
pub(super) fn ladder(grad: &GradRecipe, buffer: BufferKind) -> Vec<[StoreRecipe; 2]> {
    // Outputs that are kept are those of exact keys.
    let may_round = outputs(grad, [StoreRecipe::PLAIN; 2]).contains(&AttentionOutputs::Recompute);
    let steps = |form: OpenKey, place: OpenKey, written: StoreRecipe, rounds: bool| {
        let (form, place) = (grad.is_open(form), grad.is_open(place));
        let allowed = move |step: &&(StoreForm, StorePlace)| {
            (if form { rounds && may_round || step.0 == StoreForm::Plain } else { step.0 == written.form })
                && (place || step.1 == written.place)
        };
        LADDER.iter().filter(allowed).map(|&(form, place)| StoreRecipe { form, place }).collect::<Vec<_>>()
    };
    let checkpoints = steps(OpenKey::LayerCheckpoints, OpenKey::LayerCheckpointsPlace, grad.layer_checkpoints, true);
    let undo = steps(OpenKey::UndoLog, OpenKey::UndoLogPlace, grad.undo_log, buffer.undo_log_may_round());
    let mut pairs: Vec<_> = checkpoints.iter().flat_map(|c| undo.iter().map(move |u| [*c, *u])).collect();
    let cost = |[c, u]: &[StoreRecipe; 2]| {
        let of = |store: &StoreRecipe| (rounding(store.form), u8::from(store.place == StorePlace::File));
        let (c, u) = (of(c), of(u));
        (c.0.max(u.0), c.0 + u.0, c.1 + u.1)
    };
    pairs.sort_by_key(cost);
    pairs
}

/// The pairs that take least of the memory: in files as far as may be, and of those the exact one and the smallest. (Where the undo log
/// rounds, the gradients of all hidden states wait, which takes more in one layer band.) Where the room for files is limited, too,
/// these two of all places.
pub(super) fn smallest(ladder: &[[StoreRecipe; 2]], files_are_limited: bool) -> Vec<[StoreRecipe; 2]> {
    let places = |[c, u]: &[StoreRecipe; 2]| [c.place, u.place];
    let files = |places: &[StorePlace; 2]| places.iter().filter(|place| **place == StorePlace::File).count();
    let most = ladder.iter().map(|pair| files(&places(pair))).max().unwrap_or(0);
    let of_places = |wanted: [StorePlace; 2]| {
        let mut pairs = ladder.iter().copied().filter(move |pair| places(pair) == wanted);
        pairs.next().into_iter().chain(pairs.next_back()).collect::<Vec<_>>()
    };
    let all = [StorePlace::Memory, StorePlace::File];
    let all = all.into_iter().flat_map(|c| all.into_iter().map(move |u| [c, u]));
    all.filter(|places| files_are_limited || files(places) == most).flat_map(of_places).collect()
}

fn rounding(form: StoreForm) -> u8 {
    match form {
        StoreForm::Plain => 0,
        StoreForm::Int8 => 1,
        StoreForm::Int4 => 2,
    }
}
