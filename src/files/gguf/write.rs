//! GGUF files as they are written: of an adapter, or with the keys of another file and other tensors.

use std::path::Path;

use super::dtype::GgufDtype;
use super::file::GgufFile;
use super::header::{ARCHITECTURE, DEFAULT_ALIGNMENT, MAGIC};
use crate::files::atomic::write_atomic_with;
use crate::files::tensors::TensorHead;
use crate::units::{Bytes, Fault};

impl TensorHead<GgufDtype> {
    fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() / self.dtype.block * self.dtype.bytes
    }
}

/// Keys that are not those of the other file: its parts, what it is packed as and by which figures, and its template where there is a new one.
fn is_own(key: &str, has_template: bool) -> bool {
    let is_of_packing = key.starts_with("split.") || key.starts_with("quantize.") || key == FILE_TYPE || key == PACKING_VERSION;
    is_of_packing || (key == TEMPLATE && has_template)
}

const PACKING_VERSION: &str = "general.quantization_version";
const FILE_TYPE: &str = "general.file_type";
const TEMPLATE: &str = "tokenizer.chat_template";
const U32: u32 = 4;
const F32: u32 = 6;
const TEXT: u32 = 8;

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Keys with their values, as they lie in a file.
#[derive(Debug)]
pub struct GgufKeys {
    count: u64,
    bytes: Vec<u8>,
    /// Of the tensors, in bytes; where it is not the format's own, a key says so.
    alignment: usize,
}

impl GgufKeys {
    /// Those of a LoRA adapter whose products count `alpha / r` times (llama.cpp, `convert_lora_to_gguf.py`).
    pub fn of_lora(architecture: &str, alpha: f32) -> Self {
        let mut keys = Self { count: 0, bytes: Vec::new(), alignment: DEFAULT_ALIGNMENT as usize };
        for (key, value) in [("general.type", "adapter"), (ARCHITECTURE, architecture), ("adapter.type", "lora")] {
            keys.push(key, TEXT, &text(value));
        }
        keys.push("adapter.lora.alpha", F32, &alpha.to_le_bytes());
        keys
    }

    fn push(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.count += 1;
        self.bytes.extend([&text(key), &kind.to_le_bytes()[..], value].concat());
    }

    fn header(&self, heads: &[TensorHead<GgufDtype>]) -> Vec<u8> {
        let mut header = [&MAGIC[..], &3u32.to_le_bytes(), &(heads.len() as u64).to_le_bytes()].concat();
        header.extend(self.count.to_le_bytes());
        header.extend(&self.bytes);
        let mut offset = 0;
        for head in heads {
            header.extend([text(&head.name), (head.shape.len() as u32).to_le_bytes().into()].concat());
            header.extend(head.shape.iter().rev().flat_map(|&size| (size as u64).to_le_bytes()));
            header.extend([&head.dtype.id.to_le_bytes()[..], &(offset as u64).to_le_bytes()].concat());
            offset += head.num_bytes().next_multiple_of(self.alignment);
        }
        header.resize(header.len().next_multiple_of(self.alignment), 0);
        header
    }
}

/// Writes a file in the place of `path`. `bytes` is asked for each tensor once, in their order, and one is in memory at a time.
pub fn write_gguf(
    path: &Path,
    keys: &GgufKeys,
    heads: &[TensorHead<GgufDtype>],
    mut bytes: impl FnMut(&TensorHead<GgufDtype>) -> Result<Vec<u8>, Fault>,
) -> Result<(), Fault> {
    let header = keys.header(heads);
    let size = header.len() + heads.iter().map(|head| head.num_bytes().next_multiple_of(keys.alignment)).sum::<usize>();
    crate::files::require_space(path.parent().unwrap_or(path), Bytes(size as u64))?;
    write_atomic_with(path, |file| {
        file.write_all(&header)?;
        for head in heads {
            let mut bytes = bytes(head)?;
            if bytes.len() != head.num_bytes() {
                return Err(Fault::defect(format!("`{}` has {} bytes", head.name, bytes.len())).into());
            }
            bytes.resize(bytes.len().next_multiple_of(keys.alignment), 0);
            file.write_all(&bytes)?;
        }
        Ok(())
    })
}

impl GgufFile {
    /// The keys of a file like it most of whose matrices are of the type `dtype`; its chat template may be another one.
    pub fn keys_in(&self, dtype: GgufDtype, template: Option<&str>) -> Result<GgufKeys, Fault> {
        let stored = self.stored_keys(|key| !is_own(key, template.is_some()));
        let (count, bytes) = (stored.len() as u64, stored.concat());
        let alignment = self.count("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT as usize);
        let mut keys = GgufKeys { count, bytes, alignment };
        keys.push(FILE_TYPE, U32, &dtype.file_type().to_le_bytes());
        keys.push(PACKING_VERSION, U32, &2u32.to_le_bytes());
        if let Some(template) = template {
            keys.push(TEMPLATE, TEXT, &text(template));
        }
        Ok(keys)
    }
}
