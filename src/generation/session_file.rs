//! A session on disk: one file of tensors, whose metadata says what it belongs to.

use super::empty_prompt;
use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::engine::{Engine, Session, SessionNumbers, SessionSnapshot, SessionSpec};
use crate::files::{self, Dtype, TensorFile, TensorHead};
use crate::model::Model;
use crate::store;
use crate::units::{Fault, abridged, quoted};

/// Model, adapter, cache and dtype that a session was made with; it goes on only with the same.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct SessionIdentity {
    /// Hash of the model's files.
    pub model: String,
    /// Hash of the adapter's tensors; none without an adapter.
    pub adapter: Option<String>,
    /// What the cache computes, by the keys of the recipe.
    pub cache: BTreeMap<String, String>,
    /// What the model computes in.
    pub dtype: String,
}

impl SessionIdentity {
    /// The first part in which the other one differs: what it is, here and there.
    fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let flat = |identity: &Self| {
            let adapter = identity.adapter.clone().unwrap_or_else(|| "none".to_owned());
            let mut all = identity.cache.clone();
            let beside = [("model", identity.model.clone()), ("adapter", adapter), ("dtype", identity.dtype.clone())];
            all.extend(beside.map(|(name, value)| (name.to_owned(), value)));
            all
        };
        let (own, others) = (flat(self), flat(other));
        let name = own.keys().chain(others.keys()).find(|name| own.get(*name) != others.get(*name))?;
        let shown = |all: &BTreeMap<String, String>| all.get(name).cloned().unwrap_or_else(|| "not set".to_owned());
        Some((name.clone(), shown(&own), shown(&others)))
    }
}

/// A session that has been read back.
pub struct SavedSession {
    pub session: Session,
    /// The tokens that it has read.
    pub ids: Vec<u32>,
    /// Whether it is known to be as it was written; of what an earlier version has written nobody can tell.
    pub is_checked: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format_version: u32,
    identity: SessionIdentity,
    ids: Vec<u32>,
    numbers: SessionNumbers,
}

const FORMAT_VERSION: u32 = 2;
/// An earlier format, without a hash.
const UNHASHED: u32 = 1;
const KEY: &str = "kvtune_session";
const HASH: &str = "kvtune_session_blake3";

impl SavedSession {
    /// Writes a session that has read `ids` to a file, which is whole or not there.
    pub fn write(path: &Path, session: &Session, ids: &[u32], identity: &SessionIdentity) -> Result<(), Fault> {
        let Some(SessionSnapshot { tensors, numbers }) = session.snapshot() else { return Err(empty_prompt()) };
        let header = Header { format_version: FORMAT_VERSION, identity: identity.clone(), ids: ids.to_vec(), numbers };
        let fault = |error: serde_json::Error| not_a_session(path, &error.to_string());
        let header = serde_json::to_string(&header).map_err(fault)?;
        let tensors: Vec<_> = tensors.into_iter().map(|(name, tensor)| (name, tensor.contiguous())).collect();
        let mut hashes = BTreeMap::new();
        for (TensorHead { name, dtype, shape }, (_, tensor)) in store::tensor_heads(path, &tensors)?.into_iter().zip(&tensors) {
            hashes.insert(name, hash_of_tensor(dtype, &shape, &store::content_of(tensor)?));
        }
        let metadata = BTreeMap::from([(HASH.to_owned(), hash_of_all(&header, &hashes)), (KEY.to_owned(), header)]);
        store::save_tensors(&files::behind_links(path)?, &tensors, &metadata)
    }

    /// Reads a session back, for `at_most` tokens in all.
    pub fn read(path: &Path, engine: &Engine, model: &Model, identity: &SessionIdentity, at_most: usize) -> Result<Self, Fault> {
        let file = TensorFile::open(path)?;
        let metadata = file.metadata();
        let header = metadata.get(KEY).ok_or_else(|| not_a_session(path, "it was not written by kvtune"))?;
        let fault = |error: serde_json::Error| not_a_session(path, &error.to_string());
        // The version before the rest, which another one may not have.
        let parts: Value = serde_json::from_str(header).map_err(fault)?;
        let version = &parts["format_version"];
        let is_checked = *version != UNHASHED;
        if is_checked {
            if *version != FORMAT_VERSION {
                let reason = format!("its format is {version}, this program reads {FORMAT_VERSION}");
                return Err(not_a_session(path, &reason));
            }
            let mut hashes = BTreeMap::new();
            for name in file.names() {
                let view = file.get(&name)?;
                hashes.insert(name, hash_of_tensor(view.dtype, view.shape, view.bytes));
            }
            if metadata.get(HASH) != Some(&hash_of_all(header, &hashes)) {
                return Err(not_a_session(path, "it is damaged: its content is not what was written"));
            }
        }
        let Header { identity: found, ids, numbers, .. } = serde_json::from_value(parts).map_err(fault)?;
        if let Some((what, expected, found)) = identity.difference(&found) {
            let (path, found) = (abridged(path.display()), quoted(found));
            let message = format!("the session in `{path}` was saved with another `{what}`: expected {expected}, found {found}");
            return Err(Fault::data(message, "read the document again with `--save-session`, or use what it was saved with"));
        }
        let spec = SessionSpec { keeps_log: false, ..SessionSpec::new(1, at_most) };
        let snapshot = SessionSnapshot { tensors: store::load_tensors(&file)?, numbers };
        let session = Session::restored(engine, model, &spec, snapshot)?;
        if session.num_tokens() != ids.len() {
            return Err(not_a_session(path, "it has read another number of tokens than it lists"));
        }
        Ok(Self { session, ids, is_checked })
    }
}

fn hash_of_tensor(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> String {
    files::hash_parts([format!("{dtype} {shape:?}").as_bytes(), bytes])
}

/// Hashes the header and the tensors' hashes by name, whatever their order in the file.
fn hash_of_all(header: &str, tensors: &BTreeMap<String, String>) -> String {
    files::hash_parts([header].into_iter().chain(tensors.iter().flat_map(|(name, hash)| [name.as_str(), hash])))
}

fn not_a_session(path: &Path, reason: &str) -> Fault {
    let message = format!("`{}` is no saved session: {}", abridged(path.display()), abridged(reason));
    Fault::data(message, "name a file that `--save-session` has written")
}
