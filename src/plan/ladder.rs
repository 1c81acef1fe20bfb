//! What may wait for the backward phase in which form and where, as far as a recipe leaves it open: in the order of preference.

use crate::recipe::{AttentionOutputs, BufferKind, GradRecipe, OpenKey, StoreForm, StorePlace, StoreRecipe};

/// What may become of attention's outputs beside these stores: beside one that rounds they are computed again.
pub(super) fn outputs(grad: &GradRecipe, stores: [StoreRecipe; 2]) -> &'static [AttentionOutputs] {
    let is_open = grad.is_open(OpenKey::AttentionOutputs);
    match grad.attention_outputs {
        _ if is_open && stores.iter().all(|store| store.form == StoreForm::Plain) => AttentionOutputs::ALL,
        AttentionOutputs::Keep if !is_open => &[AttentionOutputs::Keep],
        _ => &[AttentionOutputs::Recompute],
    }
}

/// Pairs of stores that the open keys allow, the exact ones first, then by how often they go to a file.
pub(super) fn ladder(grad: &GradRecipe, buffer: BufferKind) -> Vec<[StoreRecipe; 2]> {
    // Outputs that are kept are those of exact keys.
    let may_round = outputs(grad, [StoreRecipe::PLAIN; 2]).contains(&AttentionOutputs::Recompute);
    let steps = |form: OpenKey, place: OpenKey, written: StoreRecipe, rounds: bool| {
        let (form, place) = (grad.is_open(form), grad.is_open(place));
        let allowed = move |step: &StoreRecipe| {
            (if form { rounds && may_round || step.form == StoreForm::Plain } else { step.form == written.form })
                && (place || step.place == written.place)
        };
        // In the order of preference.
        let all = StoreForm::ALL.iter().flat_map(|&form| StorePlace::ALL.iter().map(move |&place| StoreRecipe { form, place }));
        all.filter(allowed).collect::<Vec<_>>()
    };
    let checkpoints = steps(OpenKey::LayerCheckpoints, OpenKey::LayerCheckpointsPlace, grad.layer_checkpoints, true);
    let undo = steps(OpenKey::UndoLog, OpenKey::UndoLogPlace, grad.undo_log, buffer.undo_log_may_round());
    let mut pairs: Vec<_> = checkpoints.iter().flat_map(|c| undo.iter().map(move |u| [*c, *u])).collect();
    let cost = |[c, u]: &[StoreRecipe; 2]| {
        // Forms round the more the later they come.
        let of = |store: &StoreRecipe| (store.form as u8, store.place as u8);
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
