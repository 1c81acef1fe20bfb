//! A file as memory, for readers that take bytes.

use std::path::Path;
use std::sync::Arc;

use arrow::buffer::Buffer;

use super::{FileKind, io_fault, open_to_read};
use crate::native::{self, FileMap};
use crate::units::Fault;

/// A whole file as memory. Cheap to clone.
#[derive(Clone, Debug)]
pub struct MappedFile(Arc<FileMap>);

impl MappedFile {
    /// Maps a file, which must not be empty.
    pub fn open(path: &Path) -> Result<Self, Fault> {
        let file = open_to_read(path, FileKind::Data)?;
        Ok(Self(Arc::new(FileMap::new(&file).map_err(io_fault("map", path))?)))
    }

    pub fn arrow_buffer(&self) -> Buffer {
        native::arrow_buffer(&self.0)
    }

    /// Gives the memory of values that lie in the file back to the system; who looks again reads the file again. Other values are left
    /// alone.
    pub fn release<T>(&self, values: &[T]) {
        let first = (values.as_ptr() as usize).wrapping_sub(self.0.bytes().as_ptr() as usize);
        let length = size_of_val(values);
        if first.checked_add(length).is_some_and(|end| end <= self.0.bytes().len()) {
            self.0.release(first..first + length);
        }
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
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
        let map = MappedFile::open(&path).unwrap();
        map.release(&map.as_ref()[5_000..19_000]);
        map.release(&[1, 2, 3]);
        assert!(map.as_ref().iter().all(|&byte| byte == 7) && map.as_ref().len() == 20_000);
        assert!(MappedFile::open(&dir.path().join("none")).unwrap_err().io().is_some());
    }
}
