//! The recipe of a run, whose last line tells whether it is as the run wrote it.

use std::path::Path;

use super::saving::RESTORE;
use crate::files::{self, FileKind};
use crate::recipe::Recipe;
use crate::units::Fault;

/// Begins the last line, which holds the hash of those before it.
const SEAL: &str = "# BLAKE3 of the lines above: ";

pub(super) fn write_recipe(recipe: &Recipe, path: &Path) -> Result<(), Fault> {
    let text = recipe.to_toml();
    let hash = files::hash_bytes(text.as_bytes());
    files::write_atomic(path, format!("{text}{SEAL}{hash}\n").as_bytes())
}

/// Whether the recipe of a run can be checked, which one of an earlier version can't; fails where it is not as it was written.
pub(super) fn check_recipe(path: &Path) -> Result<bool, Fault> {
    let bytes = files::read_bytes(path, FileKind::Recipe)?;
    let place = bytes.windows(SEAL.len()).rposition(|window| window == SEAL.as_bytes());
    let Some((text, seal)) = place.map(|place| bytes.split_at(place)) else { return Ok(false) };
    let is_whole = seal[SEAL.len()..] == *format!("{}\n", files::hash_bytes(text)).as_bytes();
    if is_whole { Ok(true) } else { Err(changed_file(path)) }
}

/// A file of a run that is not as the run wrote it.
pub(super) fn changed_file(path: &Path) -> Fault {
    Fault::data(format!("`{}` is not as the run wrote it", path.display()), RESTORE)
}

#[cfg(test)]
mod tests {
    use super::super::RESOLVED_RECIPE;
    use super::*;

    #[test]
    fn no_byte_of_a_recipe_can_be_changed_unnoticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(RESOLVED_RECIPE);
        let text = "model.path = '.'\ndata = {format = 'tokens', train = 't'}\nkv_cache = {cache_length = 8, chunk_size = 4}";
        let recipe = Recipe::parse(text.to_owned(), &path, &[]).unwrap().recipe;
        write_recipe(&recipe, &path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert!(check_recipe(&path).unwrap());
        assert_eq!(Recipe::load(&path, &[]).unwrap().recipe.flat(), recipe.flat());
        let seal = whole.len() - SEAL.len() - 65;
        for place in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << (place % 8);
            std::fs::write(&path, bytes).unwrap();
            // Without its seal it is as good as one of an earlier version, which a run that has saved anything with this one refuses.
            let is_in_seal = (seal..seal + SEAL.len()).contains(&place);
            assert!(check_recipe(&path).map_or(true, |is_sealed| is_in_seal && !is_sealed), "{place}");
        }
        std::fs::write(&path, [&whole[..], b"# more\n"].concat()).unwrap();
        assert!(check_recipe(&path).is_err());
    }
}
