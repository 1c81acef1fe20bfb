//! A file as memory, for readers that take bytes.

use std::path::Path;
use std::sync::Arc;

use super::{FileKind, io_fault, open_to_read};
use crate::native::FileMap;
use crate::units::Fault;

/// Maps a file of data, which must not be empty.
pub fn map_file(path: &Path) -> Result<Arc<FileMap>, Fault> {
    let file = open_to_read(path, FileKind::Data)?;
    FileMap::new(&file).map(Arc::new).map_err(io_fault("map", path))
}

/// Gives the memory of values that lie in a mapped file back to the system; who looks again reads the file again. Other values are left alone.
pub fn release_mapped<T>(map: &FileMap, values: &[T]) {
    let first = (values.as_ptr() as usize).wrapping_sub(map.bytes().as_ptr() as usize);
    let length = size_of_val(values);
    if first.checked_add(length).is_some_and(|end| end <= map.bytes().len()) {
        map.release(first..first + length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, vec![7; 20_000]).unwrap();
        let map = map_file(&path).unwrap();
        release_mapped(&map, &map.bytes()[5_000..19_000]);
        release_mapped(&map, &[1, 2, 3]);
        assert!(map.bytes().iter().all(|&byte| byte == 7) && map.bytes().len() == 20_000);
        assert!(map_file(&dir.path().join("none")).unwrap_err().io().is_some());
    }
}
