//! Files as memory, and tensors that lie in it without a copy.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Once};

use arrow::buffer::Buffer;
use memmap2::{MmapOptions, MmapRaw, UncheckedAdvice};
use tch::{Kind, Tensor};

use super::autograd::{DropUser, Raw, drop_boxed, tensors};

unsafe extern "C" {
    fn kvtune_guard_mappings();
    fn kvtune_bytes_over(data: *mut c_void, length: i64, drop: DropUser, user: *mut c_void, result: *mut Raw) -> c_int;
}

/// A whole file as memory. Writes to it stay in this process; the file is never changed.
#[derive(Debug)]
pub struct FileMap(MmapRaw);

impl FileMap {
    /// Maps a file. Where it is shortened while it is mapped the process ends with a line that names it.
    pub fn new(file: &File) -> io::Result<Self> {
        static GUARDED: Once = Once::new();
        // SAFETY: it sets a handler of signals that makes nothing but system calls.
        GUARDED.call_once(|| unsafe { kvtune_guard_mappings() });
        // SAFETY: the mapping is private, so nobody sees our writes. Another process that shortens the file while it is mapped
        // ends this one through the guard; programs that replace model files do so by renaming, which leaves the mapping intact.
        unsafe { MmapOptions::new().map_copy(file) }.map(|map| Self(map.into()))
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the map is readable and as long as it says, for as long as this object lives.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.0.len()) }
    }

    /// Gives the memory of some bytes, and of whatever shares their pages, back to the system; who looks again reads the file again.
    /// Where it declines they stay resident, which costs room and nothing else.
    pub fn release(&self, bytes: std::ops::Range<usize>) {
        // SAFETY: the pages are those of a file and were never written to, so they come back as they were.
        let _ = unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
    }
}

/// The bytes of the file for Arrow, without a copy.
pub fn arrow_buffer(map: &Arc<FileMap>) -> Buffer {
    let (data, length) = (NonNull::from(map.bytes()).cast(), map.bytes().len());
    // SAFETY: the bytes lie in the map, which the buffer keeps alive.
    unsafe { Buffer::from_custom_allocation(data, length, Arc::<FileMap>::clone(map)) }
}

/// A tensor that lies in the map at `offset` and keeps it alive; `None` if it would be misaligned or reach beyond the end.
///
/// Treat it as read-only: another tensor, or a reader of the bytes, may lie over the same memory.
///
/// # Shapes
/// Returns a contiguous tensor of `size`.
pub fn tensor_over(map: &Arc<FileMap>, offset: usize, size: &[i64], kind: Kind) -> Option<Tensor> {
    let width = kind.elt_size_in_bytes();
    let length = size.iter().try_fold(width, |n, &d| n.checked_mul(usize::try_from(d).ok()?))?;
    let span = map.bytes().get(offset..offset.checked_add(length)?)?;
    let data = span.as_ptr().cast_mut().cast::<c_void>();
    if length == 0 || !(data as usize).is_multiple_of(width) {
        return None;
    }
    let user = Box::into_raw(Box::new(Arc::clone(map))).cast();
    // SAFETY: the span lies in the map, which `user` keeps alive until the storage is freed; the memory is private and writable.
    let made = tensors(|result| unsafe { kvtune_bytes_over(data, length as i64, drop_boxed::<Arc<FileMap>>, user, result) });
    made.ok().and_then(|[bytes]| bytes).map(|bytes| bytes.view_dtype(kind).view(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_over_a_map_outlives_it_and_never_changes_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, [1.0f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat()).unwrap();
        let map = Arc::new(FileMap::new(&File::open(&path).unwrap()).unwrap());
        let x = tensor_over(&map, 0, &[2, 2], Kind::Float).unwrap();
        assert_eq!(x.data_ptr().cast_const().cast::<u8>(), map.bytes().as_ptr());
        assert!(tensor_over(&map, 2, &[1], Kind::Float).is_none(), "misaligned");
        assert!(tensor_over(&map, 0, &[5], Kind::Float).is_none(), "beyond the end");
        drop(map);
        let mut y = x.shallow_clone();
        let _ = y.fill_(7.0);
        assert_eq!(Vec::<f32>::try_from(x.view([4])).unwrap(), [7.0; 4]);
        assert_eq!(std::fs::read(&path).unwrap()[..4], 1.0f32.to_le_bytes());
    }

    #[test]
    fn what_is_released_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let content: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let map = FileMap::new(&File::open(&path).unwrap()).unwrap();
        assert!(map.bytes() == content);
        map.release(5000..99_000);
        assert!(map.bytes() == content);
    }
}
