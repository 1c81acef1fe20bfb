//! Bytes on disk: files written whole, scratch files, safetensors, hashes and locks.

pub mod disk;
pub mod failpoint;

mod atomic;
mod gguf;
mod hash;
mod hub;
mod io_fault;
mod json;
mod lock;
mod model_files;
mod new_dir;
mod open;
mod scratch;
mod stamp;
mod tensors;

pub use atomic::{
    behind_links, check_writable, is_temporary, put_dir, refuse_symlink, replace_dir, sync_dir, temporary_beside, write_atomic,
    write_atomic_with, write_named,
};
pub use gguf::{GgufDtype, GgufFile, GgufKeys, architecture_of, write_gguf};
pub use hash::{hash_bytes, hash_ends, hash_file, hash_parts};
pub use hub::{cached_id, hub_name, hub_snapshot, is_blob_of, is_hub_name, model_dir};
pub use io_fault::{hint_of_io, io_fault};
pub use json::{StrictJson, not_json, parse_json, read_json, read_json_as, to_json};
pub use lock::{DirLock, lock_file};
pub use model_files::{
    TEMPLATE_FOLDER, further_templates, has_of_model, is_model, lies_in, object_of_model, read_companion, read_of_model,
};
pub use new_dir::{put_new_dir, require_unused};
pub use open::{FileKind, is_there, map_file, open_to_read, read_bytes, read_if_there, read_text, release_mapped};
pub use scratch::{Scratch, unnamed_file};
pub use stamp::{Stamp, cache_folder, hash_large_file};
pub use tensors::{Dtype, RawTensor, TensorFile, TensorHead, TensorView, write_tensors, write_tensors_streamed};

use std::path::{Path, PathBuf};

use crate::units::{Bytes, Fault, abridged};

/// A path from the root on; as it is where the working directory is gone.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The longest part of a path that exists: what is made at the path would be on its file system.
pub fn nearest_existing(path: &Path) -> PathBuf {
    let path = absolute(path);
    path.ancestors().find(|path| path.exists()).unwrap_or(&path).to_owned()
}

/// Makes a directory and those above it, where they do not exist, and makes their names durable: what is saved inside is lost with them.
pub fn make_dir(path: &Path) -> Result<(), Fault> {
    let absolute = std::path::absolute(path).map_err(io_fault("make", path))?;
    // One that is too long as a whole would be made up to where it is.
    if let Err(error) = absolute.symlink_metadata()
        && error.kind() == std::io::ErrorKind::InvalidFilename
    {
        return Err(io_fault("make", path)(error));
    }
    let is_new = |dir: &&Path| !dir.exists();
    let new: Vec<&Path> = absolute.ancestors().take_while(is_new).collect();
    for dir in new.iter().rev() {
        // Another process may have made it meanwhile.
        if let Err(error) = disk::make_dir("dir", dir)
            && !(error.kind() == std::io::ErrorKind::AlreadyExists && dir.is_dir())
        {
            return Err(io_fault("make", path)(error));
        }
    }
    if !path.is_dir() {
        return Err(io_fault("make", path)(rustix::io::Errno::EXIST.into()));
    }
    new.iter().rev().filter_map(|dir| dir.parent()).try_for_each(sync_dir)
}

/// The room that is left for this user on the file system of `path`.
pub fn free_space(path: &Path) -> Result<Bytes, Fault> {
    let found = rustix::fs::statvfs(path).map_err(|e| io_fault("look at", path)(e.into()))?;
    Ok(Bytes(found.f_bavail.saturating_mul(found.f_frsize)))
}

/// Fails with both figures if less than `needed` is free on the file system of `path`.
pub fn require_space(path: &Path, needed: Bytes) -> Result<(), Fault> {
    let free = free_space(path)?;
    if free < needed {
        let fault = Fault::failed(format!("`{}` needs {needed}, but only {free} are free there", abridged(path.display())));
        return Err(fault.with_hint(io_fault::MAKE_ROOM));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_counted_and_missing_space_is_told_with_both_figures() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_space(dir.path()).unwrap() > Bytes(0));
        require_space(dir.path(), Bytes(1)).unwrap();
        let error = require_space(dir.path(), Bytes(u64::MAX)).unwrap_err();
        assert!(error.to_string().contains(" TiB, but only ") && error.hint().is_some(), "{error}");
    }
}
