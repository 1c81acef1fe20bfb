//! A GGUF file with the keys of another one and other tensors.

use std::borrow::Cow;
use std::path::Path;

use super::dtype::GgufDtype;
use super::file::GgufFile;
use super::header::{DEFAULT_ALIGNMENT, MAGIC, Reader};
use crate::files::tensors::{TensorHead, write_in_turn};
use crate::units::{Bytes, Fault};

/// In what a file differs from the one whose keys it has.
#[derive(Clone, Copy, Debug)]
pub struct GgufForm<'a> {
    /// The type of most of its matrices.
    pub dtype: GgufDtype,
    /// Its chat template, where that is another one.
    pub template: Option<&'a str>,
}

impl TensorHead<GgufDtype> {
    fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() / self.dtype.block * self.dtype.bytes
    }
}

/// Keys that are not those of the other file: of how many parts it consists, what it is packed as and by which figures, and its template where
/// there is a new one.
fn is_own(key: &str, has_template: bool) -> bool {
    let is_of_packing = key.starts_with("split.") || key.starts_with("quantize.") || key == FILE_TYPE || key == PACKING_VERSION;
    is_of_packing || (key == TEMPLATE && has_template)
}

/// The version of ggml's blocks.
const PACKING_VERSION: &str = "general.quantization_version";
const FILE_TYPE: &str = "general.file_type";
const TEMPLATE: &str = "tokenizer.chat_template";
const U32: u32 = 4;
const TEXT: u32 = 8;

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl GgufFile {
    /// Writes a file with this one's keys, in the place of `path`. `bytes` is asked for each tensor once, in their order, and one is in
    /// memory at a time.
    pub fn write_with(
        &self,
        path: &Path,
        form: GgufForm<'_>,
        heads: &[TensorHead<GgufDtype>],
        mut bytes: impl FnMut(&TensorHead<GgufDtype>) -> Result<Vec<u8>, Fault>,
    ) -> Result<(), Fault> {
        let alignment = self.count("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT as usize);
        let header = self.header_of(form, heads, alignment)?;
        let size = header.len() + heads.iter().map(|head| head.num_bytes().next_multiple_of(alignment)).sum::<usize>();
        crate::files::require_space(path.parent().unwrap_or(path), Bytes(size as u64))?;
        write_in_turn(path, heads.len() + 1, |part| {
            let Some(at) = part.checked_sub(1) else { return Ok(Cow::Borrowed(&header)) };
            let mut bytes = bytes(&heads[at])?;
            if bytes.len() != heads[at].num_bytes() {
                return Err(Fault::defect(format!("`{}` has {} bytes", heads[at].name, bytes.len())));
            }
            bytes.resize(bytes.len().next_multiple_of(alignment), 0);
            Ok(Cow::Owned(bytes))
        })
    }

    fn header_of(&self, form: GgufForm<'_>, heads: &[TensorHead<GgufDtype>], alignment: usize) -> Result<Vec<u8>, Fault> {
        let GgufForm { dtype, template } = form;
        let first = self.first_part();
        let mut keys = Reader { path: self.path(), bytes: first, at: 0 }.key_ranges()?;
        keys.retain(|(key, _)| !is_own(key, template.is_some()));
        let mut header = [&MAGIC[..], &3u32.to_le_bytes(), &(heads.len() as u64).to_le_bytes()].concat();
        header.extend((keys.len() as u64 + 2 + u64::from(template.is_some())).to_le_bytes());
        header.extend(keys.into_iter().flat_map(|(_, range)| &first[range]));
        for (key, number) in [(FILE_TYPE, dtype.file_type()), (PACKING_VERSION, 2)] {
            header.extend([text(key), U32.to_le_bytes().into(), number.to_le_bytes().into()].concat());
        }
        if let Some(template) = template {
            header.extend([text(TEMPLATE), TEXT.to_le_bytes().into(), text(template)].concat());
        }
        let mut offset = 0;
        for head in heads {
            header.extend([text(&head.name), (head.shape.len() as u32).to_le_bytes().into()].concat());
            header.extend(head.shape.iter().rev().flat_map(|&size| (size as u64).to_le_bytes()));
            header.extend([&head.dtype.id.to_le_bytes()[..], &(offset as u64).to_le_bytes()].concat());
            offset += head.num_bytes().next_multiple_of(alignment);
        }
        header.resize(header.len().next_multiple_of(alignment), 0);
        Ok(header)
    }
}
