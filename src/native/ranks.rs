//! c10d: a store of keys that several processes share, and sums and exchanges of tensors among them over Gloo.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::ptr::{null, null_mut};
use std::time::Duration;

use tch::Tensor;

use super::autograd::{BackwardError, Raw, check, pointer, written};
use super::shim_object::ShimObject;

unsafe extern "C" {
    fn kvtune_store_open(host: *const c_char, port: u16, listener: c_int, timeout: i64, out: *mut *mut c_void) -> c_int;
    fn kvtune_store_close(store: *mut c_void);
    fn kvtune_store_set(store: *mut c_void, key: *const c_char, bytes: *const u8, count: usize) -> c_int;
    fn kvtune_store_get(store: *mut c_void, key: *const c_char, bytes: *mut *const u8, count: *mut usize) -> c_int;
    fn kvtune_store_add(store: *mut c_void, key: *const c_char, by: i64, out: *mut i64) -> c_int;
    fn kvtune_store_has(store: *mut c_void, key: *const c_char, out: *mut c_int) -> c_int;
    fn kvtune_gloo_open(
        store: *mut c_void,
        prefix: *const c_char,
        rank: c_int,
        size: c_int,
        interface: *const c_char,
        address: *const c_char,
        timeout: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    fn kvtune_gloo_close(group: *mut c_void);
    fn kvtune_gloo_sum(group: *mut c_void, tensor: Raw, timeout: i64, work: *mut *mut c_void) -> c_int;
    fn kvtune_gloo_broadcast(group: *mut c_void, tensor: Raw, from: c_int, timeout: i64, work: *mut *mut c_void) -> c_int;
    fn kvtune_gloo_gather(group: *mut c_void, output: Raw, input: Raw, timeout: i64, work: *mut *mut c_void) -> c_int;
    fn kvtune_work_wait(work: *mut c_void, timeout: i64, done: *mut c_int) -> c_int;
    fn kvtune_work_drop(work: *mut c_void);
}

/// The name that this machine gives itself; empty where it has none.
pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim_end().to_owned()
}

/// What c10d or NCCL said, on one line.
pub(super) type Said<T> = Result<T, String>;

fn said<T>(done: Result<T, BackwardError>) -> Said<T> {
    done.map_err(|BackwardError(text)| {
        let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("no reason is given");
        // Gloo begins with the place in its own source.
        let first = first.trim();
        first.strip_prefix('[').and_then(|rest| rest.split_once("] ")).map_or(first, |(_, rest)| rest).to_owned()
    })
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX / 1_000_000)
}

fn zero_ended(text: &str) -> Said<CString> {
    CString::new(text).map_err(|_| format!("`{}` holds a zero byte", text.escape_debug()))
}

/// A client of a `TCPStore`, and where it was opened with a listener, the store itself.
///
/// One call at a time: others wait, also while one waits for a key.
pub struct SharedStore(ShimObject);

// SAFETY: c10d's client takes a lock for each call.
unsafe impl Send for SharedStore {}
// SAFETY: as above.
unsafe impl Sync for SharedStore {}

impl SharedStore {
    /// Connects with the store at `host`, which it serves where there is a `listener`. `timeout` is for this and for each [`get`](Self::get).
    pub fn open(host: &str, port: u16, listener: Option<TcpListener>, timeout: Duration) -> Said<Self> {
        let name = zero_ended(host)?;
        let listener = listener.map_or(-1, IntoRawFd::into_raw_fd);
        let (host, time) = (name.as_ptr(), millis(timeout));
        // SAFETY: a string that ends with a zero, and a socket that is given away; a new store is written.
        said(unsafe { ShimObject::made(kvtune_store_close, |out| kvtune_store_open(host, port, listener, time, out)) }).map(Self)
    }

    pub fn set(&self, key: &str, value: &[u8]) -> Said<()> {
        let key = zero_ended(key)?;
        // SAFETY: a store that is open, a string that ends with a zero, and bytes that are only read.
        said(check(unsafe { kvtune_store_set(self.0.get(), key.as_ptr(), value.as_ptr(), value.len()) }))
    }

    /// Reads a key; waits until it is there.
    pub fn get(&self, key: &str) -> Said<Vec<u8>> {
        let (key, mut bytes, mut count) = (zero_ended(key)?, null(), 0);
        // SAFETY: a store that is open, a string that ends with a zero, and room for a pointer and a count.
        said(check(unsafe { kvtune_store_get(self.0.get(), key.as_ptr(), &raw mut bytes, &raw mut count) }))?;
        // SAFETY: as many bytes as it says, until this thread's next call; an empty value may have no place.
        Ok(if count == 0 { Vec::new() } else { unsafe { std::slice::from_raw_parts(bytes, count) }.to_vec() })
    }

    /// Adds to a number, which begins at 0; returns what it is then.
    pub fn add(&self, key: &str, by: i64) -> Said<i64> {
        let key = zero_ended(key)?;
        // SAFETY: a store that is open, a string that ends with a zero, and room for a number.
        said(written(0, |sum| unsafe { kvtune_store_add(self.0.get(), key.as_ptr(), by, sum) }))
    }

    pub fn has(&self, key: &str) -> Said<bool> {
        let key = zero_ended(key)?;
        // SAFETY: a store that is open, a string that ends with a zero, and room for a number.
        said(written(0, |has| unsafe { kvtune_store_has(self.0.get(), key.as_ptr(), has) })).map(|has| has != 0)
    }
}

/// Connections with all ranks. All ranks make the same calls in the same order.
///
/// It is closed by [`close`](Self::close) alone: that waits for what is under way, which may never end where a rank is gone.
pub struct GlooGroup {
    group: *mut c_void,
    timeout: i64,
}

// SAFETY: it is used by one thread at a time, whichever.
unsafe impl Send for GlooGroup {}

impl GlooGroup {
    /// Connects; `prefix` is where in the store the ranks leave each other their addresses. The others reach this one by the `interface`, or,
    /// where none is named, by the `address` of this machine. c10d gives up by itself after these times, connecting and in an exchange.
    pub fn open(
        store: &SharedStore,
        prefix: &str,
        [rank, size]: [usize; 2],
        interface: Option<&str>,
        address: &str,
        [connecting, exchange]: [Duration; 2],
    ) -> Said<Self> {
        let (prefix, address) = (zero_ended(prefix)?, zero_ended(address)?);
        let interface = interface.map(zero_ended).transpose()?;
        let [interface, address] = [interface.as_ref(), Some(&address)].map(|name| name.map_or(null(), |name| name.as_ptr()));
        let (prefix, rank, size, time) = (prefix.as_ptr(), rank as c_int, size as c_int, millis(connecting));
        // SAFETY: an open store, strings that end with a zero or are null, and room for a pointer.
        let group = written(null_mut(), |out| unsafe {
            kvtune_gloo_open(store.0.get(), prefix, rank, size, interface, address, time, out)
        });
        Ok(Self { group: said(group)?, timeout: millis(exchange) })
    }

    /// Closes the connections once all exchanges have ended.
    pub fn close(&mut self) {
        // SAFETY: it was opened, and is null from now on.
        unsafe { kvtune_gloo_close(std::mem::replace(&mut self.group, null_mut())) }
    }

    /// Begins a sum over all ranks in the memory of `tensor`, on the host.
    pub fn sum(&self, tensor: &Tensor) -> Said<GroupWork> {
        // SAFETY: an open group and a tensor, whose memory the work keeps; room for a pointer.
        GroupWork::begun(|work| unsafe { kvtune_gloo_sum(self.group, pointer(tensor), self.timeout, work) })
    }

    /// Begins to overwrite `tensor` with that of the rank `from`.
    pub fn broadcast(&self, tensor: &Tensor, from: usize) -> Said<GroupWork> {
        // SAFETY: as in `sum`.
        GroupWork::begun(|work| unsafe { kvtune_gloo_broadcast(self.group, pointer(tensor), from as c_int, self.timeout, work) })
    }

    /// Begins to overwrite the rows of `output` with the `input` of each rank.
    ///
    /// # Shapes
    /// `input` is (n), `output` (ranks, n).
    pub fn gather(&self, output: &Tensor, input: &Tensor) -> Said<GroupWork> {
        // SAFETY: as in `sum`.
        GroupWork::begun(|work| unsafe { kvtune_gloo_gather(self.group, pointer(output), pointer(input), self.timeout, work) })
    }
}

pub trait PendingExchange {
    /// Waits for so long at most; says whether it has ended.
    fn wait(&self, time: Duration) -> Result<bool, String>;
}

/// What is dropped while it is under way keeps itself.
pub struct GroupWork(ShimObject);

impl GroupWork {
    fn begun(begin: impl FnOnce(*mut *mut c_void) -> c_int) -> Said<Self> {
        // SAFETY: a new work is written.
        said(unsafe { ShimObject::made(kvtune_work_drop, begin) }).map(Self)
    }
}

impl PendingExchange for GroupWork {
    fn wait(&self, time: Duration) -> Said<bool> {
        // SAFETY: a work that was begun, and room for a number.
        said(written(0, |done| unsafe { kvtune_work_wait(self.0.get(), millis(time).max(1), done) })).map(|done| done != 0)
    }
}

#[cfg(test)]
mod tests {
    /// By mangled names, which say the signatures. A libtorch that lacks one has another Gloo than the headers in `shim/stubs` declare.
    #[test]
    fn what_the_stubs_of_gloo_declare_is_in_libtorch() {
        let loaded = libloading::os::unix::Library::this();
        for name in [
            "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE",
            "_ZN4gloo9transport13UnboundBufferD1Ev",
            "_ZN4gloo9transport6DeviceD1Ev",
            "_ZTVN4c10d16ProcessGroupGloo9GlooStoreE",
            "_ZN4c10d16ProcessGroupGloo24createDeviceForInterfaceERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEb",
        ] {
            // SAFETY: it is looked for, and neither read nor called.
            let found = unsafe { loaded.get::<*const u8>(name.as_bytes()) };
            assert!(found.is_ok(), "{name}");
        }
    }
}
