//! The Hugging Face cache: the directory of a model that is named as on the Hub.

use std::env;
use std::path::{Path, PathBuf};

use super::open::{FileKind, read_text};
use crate::units::{Fault, abridged};

/// The directory of the model `name`, as `Qwen/Qwen2.5-0.5B`, at a branch, a tag or a commit; `None` where the cache has it not.
pub fn hub_snapshot(name: &str, revision: Option<&str>) -> Option<PathBuf> {
    let revision = revision.unwrap_or("main");
    let stays_inside = revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.')) && !revision.contains('\0');
    let folder = cache()?.join(format!("models--{}", name.replace('/', "--")));
    if !is_hub_name(name) || !stays_inside {
        return None;
    }
    let commit = read_text(&folder.join("refs").join(revision), FileKind::Note).unwrap_or_else(|_| revision.to_owned());
    let commit = commit.trim();
    let snapshot = folder.join("snapshots").join(commit);
    let is_there =
        !commit.is_empty() && commit.chars().all(|c| c.is_ascii_alphanumeric()) && snapshot.join("config.json").exists();
    is_there.then_some(snapshot)
}

/// What was named on the command line: a directory, or where there is none one of the Hugging Face cache, which must have the `revision`.
pub fn model_dir(path: &Path, revision: Option<&str>) -> Result<PathBuf, Fault> {
    let Some(name) = path.to_str().filter(|name| !path.exists() && is_hub_name(name)) else { return Ok(path.to_owned()) };
    match (hub_snapshot(name, revision), revision) {
        (Some(snapshot), _) => Ok(snapshot),
        (None, None) => Ok(path.to_owned()),
        (None, Some(revision)) => {
            let message = format!("the Hugging Face cache has no revision `{}` of `{name}`", abridged(revision));
            Err(Fault::data(message, format!("`hf download {name} --revision {}` fetches it", abridged(revision))))
        }
    }
}

/// The id of what lies in Hugging Face's cache, where `models--ORG--NAME/snapshots/REVISION` holds `ORG/NAME`.
pub fn cached_id(path: &Path, kind: &str) -> Option<String> {
    let absolute = std::path::absolute(path).ok()?;
    let snapshots = absolute.ancestors().find(|folder| folder.file_name().is_some_and(|name| name == "snapshots"))?;
    let folder = snapshots.parent()?.file_name()?.to_str()?;
    let id = folder.strip_prefix(kind)?.strip_prefix("--")?.replace("--", "/");
    is_hub_name(&id).then_some(id)
}

/// The name on the Hub that was probably meant by a directory that is not there: `NAME` where only it is missing, else `OWNER/NAME`.
pub fn hub_name(dir: &Path) -> Option<String> {
    let (folder, last) = (dir.parent()?, dir.file_name()?.to_str()?);
    let name = if folder.exists() { last.to_owned() } else { format!("{}/{last}", folder.file_name()?.to_str()?) };
    let begins_there = folder.exists() || folder.parent().is_some_and(Path::exists);
    (!dir.exists() && begins_there && is_hub_name(&name)).then_some(name)
}

/// Whether a file behind all links is one that a snapshot of the cache, `snapshots/COMMIT`, points to: `blobs/HASH` of the same repository.
pub fn is_blob_of(snapshot: &Path, file: &Path) -> bool {
    let snapshots = snapshot.parent().filter(|above| above.ends_with("snapshots"));
    snapshots.and_then(Path::parent).is_some_and(|repository| file.parent() == Some(&repository.join("blobs")))
}

/// Where `huggingface_hub` keeps what it has fetched.
fn cache() -> Option<PathBuf> {
    let folder = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from).map(at_home);
    let home = || {
        folder("HF_HOME")
            .or_else(|| Some(folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?.join("huggingface")))
    };
    let cache = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE")).or_else(|| Some(home()?.join("hub")))?;
    std::path::absolute(cache).ok().filter(|cache| cache.to_str().is_some())
}

/// `~` at the beginning is the user's directory, as `huggingface_hub` reads it.
fn at_home(path: PathBuf) -> PathBuf {
    match (path.strip_prefix("~"), env::var_os("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path,
    }
}

/// Whether the Hub may call something so: `NAME`, or `OWNER/NAME`.
pub fn is_hub_name(text: &str) -> bool {
    let is_part = |part: &str| {
        let is_fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && part.chars().all(is_fine) && !part.starts_with(['-', '.']) && !part.ends_with(['-', '.'])
    };
    text.len() <= 96
        && !text.contains("--")
        && !text.contains("..")
        && text.split('/').count() <= 2
        && text.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_hub() {
        for name in ["gpt2", "Qwen/Qwen2.5-0.5B", "a_b/c.d-e"] {
            assert!(is_hub_name(name), "{name}");
        }
        for path in ["", "/a", "a/", "a/b/c", "../a", "./a", "a--b", "a..b", ".a", "a b", "a/-b", "\u{e9}"] {
            assert!(!is_hub_name(path), "{path}");
        }
    }

    #[test]
    fn a_missing_directory_may_be_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let name = |path: &str| hub_name(&folder.path().join(path));
        assert_eq!((name("gpt2"), name("Qwen/Qwen2.5-0.5B")), (Some("gpt2".into()), Some("Qwen/Qwen2.5-0.5B".into())));
        assert_eq!((name("a/b/c"), hub_name(folder.path())), (None, None));
    }
}
