//! Tensors from safetensors files and back.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use tch::{Device, Kind, TchError, Tensor};

use crate::files::{self, Dtype, TensorFile, TensorHead, TensorView};
use crate::native;
use crate::native::cuda::Upload;
use crate::units::{Exit, Fault, abridged, quoted};

/// A tensor of a file, on the host, in the file's type. Where alignment allows it lies in the file's memory: read it, move it or
/// copy it, but do not write to it in place.
pub fn load_tensor(file: &TensorFile, name: &str) -> Result<Tensor, Fault> {
    let (view, size, kind) = described(file, name)?;
    // A byte that is neither 0 nor 1 is no `bool` to libtorch's kernels; the comparison makes it one.
    if kind == Kind::Bool {
        let bytes = Tensor::f_from_data_size(view.bytes, &size, Kind::Uint8).map_err(|e| torch(name, &e))?;
        return Ok(bytes.ne(0));
    }
    if let Some(tensor) = native::tensor_over(view.map, view.offset, &size, kind) {
        return Ok(tensor);
    }
    Tensor::f_from_data_size(view.bytes, &size, kind).map_err(|e| torch(name, &e))
}

/// A tensor as it lies in a file, with its shape and kind as libtorch has them.
fn described<'a>(file: &'a TensorFile, name: &str) -> Result<(TensorView<'a>, Vec<i64>, Kind), Fault> {
    let view = file.get(name)?;
    let kind = kind_of(view.dtype).ok_or_else(|| wrong_dtype(file.path(), name, view.dtype))?;
    Ok((view, view.shape.iter().map(|&n| n as i64).collect(), kind))
}

#[derive(Clone, Copy, Debug)]
pub enum LoadTarget<'a> {
    /// On the host, where the file is mapped if it is of the wanted kind there: to be read.
    File,
    /// On the host, in memory of its own: to be written to.
    Host,
    Device(&'a Upload),
}

/// A tensor of a file, of `kind`, for its `target`. Of the file nothing else stays resident, so that a model that is read tensor by tensor
/// takes no more than itself and one tensor. A device gets the file's own bytes, and converts them.
pub fn load_tensor_to(file: &TensorFile, name: &str, kind: Kind, target: LoadTarget<'_>) -> Result<Tensor, Fault> {
    let tensor = if let LoadTarget::Device(upload) = target {
        let (view, size, stored) = described(file, name)?;
        upload.bring(view.bytes, &size, stored).map_err(|e| torch(name, &e))?.to_kind(kind)
    } else {
        let stored = load_tensor(file, name)?;
        match (stored.kind() == kind, target) {
            (true, LoadTarget::File) => return Ok(stored),
            (true, _) => stored.copy(),
            (false, _) => stored.to_kind(kind),
        }
    };
    file.release(name);
    Ok(tensor)
}

/// All tensors of a file, as [`load_tensor`] gives them, in the order of the file.
pub fn load_tensors(file: &TensorFile) -> Result<Vec<(String, Tensor)>, Fault> {
    file.names().into_iter().map(|name| load_tensor(file, &name).map(|tensor| (name, tensor))).collect()
}

/// Writes tensors, from any device, as one safetensors file, atomically.
pub fn save_tensors(path: &Path, tensors: &[(String, Tensor)], metadata: &BTreeMap<String, String>) -> Result<(), Fault> {
    save_streamed(path, &tensor_heads(path, tensors)?, metadata, |index| Ok(tensors[index].1.shallow_clone()))
}

/// Writes the file of [`save_tensors`] with only one tensor copied at a time: `tensor` is asked for each by its index, once.
pub fn save_streamed(
    path: &Path,
    heads: &[TensorHead],
    metadata: &BTreeMap<String, String>,
    mut tensor: impl FnMut(usize) -> Result<Tensor, Fault>,
) -> Result<(), Fault> {
    files::write_tensors_streamed(path, heads, metadata, |index| {
        let bytes = content_of(&tensor(index)?).map_err(|e| torch(&heads[index].name, &e))?;
        Ok(bytes.into())
    })
}

/// How tensors stand in a file that is to be written to `path`.
pub fn tensor_heads(path: &Path, tensors: &[(String, Tensor)]) -> Result<Vec<TensorHead>, Fault> {
    let head = |(name, tensor): &(String, Tensor)| {
        let known = KINDS.iter().find(|(_, kind)| *kind == tensor.kind()).map(|(dtype, _)| *dtype);
        let dtype = known.ok_or_else(|| wrong_dtype(path, name, format!("{:?}", tensor.kind())))?;
        Ok(TensorHead { name: name.clone(), dtype, shape: tensor.size().into_iter().map(|n| n as usize).collect() })
    };
    tensors.iter().map(head).collect()
}

/// A tensor on the host for what stands so in a file, with any numbers in it.
pub fn room_for(head: &TensorHead) -> Tensor {
    let size: Vec<i64> = head.shape.iter().map(|&n| n as i64).collect();
    // What is written is of a kind that is known.
    Tensor::empty(&size[..], (kind_of(head.dtype).unwrap_or(Kind::Uint8), Device::Cpu))
}

/// The metadata that HF's programs expect of a file with tensors.
pub fn pt_metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// The bytes of a tensor's numbers, one after the other.
pub fn content_of(x: &Tensor) -> Result<Vec<u8>, TchError> {
    let host = x.detach().to_device(Device::Cpu);
    let mut bytes = vec![0; host.numel() * host.kind().elt_size_in_bytes()];
    host.f_copy_data_u8(&mut bytes, host.numel())?;
    Ok(bytes)
}

/// What libtorch made of a tensor of this name.
fn torch(name: &str, error: &dyn std::error::Error) -> Fault {
    Fault::new(Exit::Data, format!("libtorch, with `{}`: {}", quoted(name), abridged(error)))
}

fn wrong_dtype(path: &Path, name: &str, found: impl Display) -> Fault {
    let (path, name, found) = (abridged(path.display()), quoted(name), quoted(found));
    let message = format!("`{name}` in `{path}` is {found}, expected one of F64, F32, F16, BF16, I64, I32, I16, U8, BOOL");
    Fault::data(message, "save the tensor as one of these types")
}

const KINDS: [(Dtype, Kind); 9] = [
    (Dtype::F64, Kind::Double),
    (Dtype::F32, Kind::Float),
    (Dtype::F16, Kind::Half),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::I64, Kind::Int64),
    (Dtype::I32, Kind::Int),
    (Dtype::I16, Kind::Int16),
    (Dtype::U8, Kind::Uint8),
    (Dtype::BOOL, Kind::Bool),
];

fn kind_of(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|(d, _)| *d == dtype).map(|(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::RawTensor;

    fn round_trip(tensors: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        save_tensors(&path, tensors, &BTreeMap::new()).unwrap();
        load_tensors(&TensorFile::open(&path).unwrap()).unwrap()
    }

    #[test]
    fn every_type_and_shape_comes_back_exactly() {
        let base = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([2, 3, 4]) - 7.5;
        let mut tensors: Vec<(String, Tensor)> =
            KINDS.iter().map(|(dtype, kind)| (dtype.to_string(), base.abs().to_kind(*kind))).collect();
        tensors.push(("scalar".into(), Tensor::from(1.25f64)));
        tensors.push(("empty".into(), Tensor::zeros([0, 3], (Kind::Float, Device::Cpu))));
        tensors.push(("transposed".into(), base.transpose(0, 2)));
        tensors.push(("leaf".into(), base.copy().set_requires_grad(true)));
        let found = round_trip(&tensors);
        assert_eq!(found.len(), tensors.len());
        for (name, expected) in &tensors {
            let (_, tensor) = found.iter().find(|(n, _)| n == name).unwrap();
            assert_eq!((tensor.kind(), tensor.size()), (expected.kind(), expected.size()), "{name}");
            assert!(tensor.equal(&expected.detach()), "{name}");
        }
    }

    #[test]
    fn tensors_are_not_copied_and_outlive_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let x = Tensor::randn([64, 64], (Kind::Float, Device::Cpu));
        save_tensors(&path, &[("x".into(), x.shallow_clone())], &BTreeMap::new()).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let found = load_tensor(&file, "x").unwrap();
        assert_eq!(found.data_ptr().cast_const().cast::<u8>(), file.get("x").unwrap().bytes.as_ptr());
        drop(file);
        std::fs::remove_file(&path).unwrap();
        assert!(found.equal(&x));
    }

    #[test]
    fn a_tensor_goes_where_it_is_wanted_and_nothing_of_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let x = Tensor::randn([64, 100], (Kind::Float, Device::Cpu));
        save_tensors(&path, &[("x".into(), x.shallow_clone())], &BTreeMap::new()).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let upload = Upload::to(Device::Cpu);
        for kind in [Kind::Float, Kind::BFloat16] {
            for target in [LoadTarget::File, LoadTarget::Host, LoadTarget::Device(&upload)] {
                let mut found = load_tensor_to(&file, "x", kind, target).unwrap();
                assert!(found.kind() == kind && found.equal(&x.to_kind(kind)), "{kind:?} {target:?}");
                let lies_in_file = found.data_ptr().cast_const().cast::<u8>() == file.get("x").unwrap().bytes.as_ptr();
                assert_eq!(lies_in_file, kind == Kind::Float && matches!(target, LoadTarget::File), "{kind:?} {target:?}");
                if !lies_in_file {
                    let _ = found.fill_(7.0);
                }
            }
        }
        assert!(load_tensor(&file, "x").unwrap().equal(&x));
        assert!(load_tensor_to(&file, "y", Kind::Float, LoadTarget::Host).is_err());
    }

    #[test]
    fn a_hostile_boolean_is_made_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let raw = RawTensor { name: "b".into(), dtype: Dtype::BOOL, shape: vec![3], bytes: vec![0, 1, 200].into() };
        files::write_tensors(&path, &[raw], &BTreeMap::new()).unwrap();
        let found = load_tensor(&TensorFile::open(&path).unwrap(), "b").unwrap();
        assert_eq!(Vec::<i64>::try_from(found.to_kind(Kind::Int64)).unwrap(), [0, 1, 1]);
    }

    #[test]
    fn types_that_are_not_used_are_refused_with_their_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let raw = RawTensor { name: "q".into(), dtype: Dtype::U16, shape: vec![1], bytes: vec![0, 0].into() };
        files::write_tensors(&path, &[raw], &BTreeMap::new()).unwrap();
        let error = load_tensor(&TensorFile::open(&path).unwrap(), "q").unwrap_err();
        assert!(error.to_string().contains("`q`") && error.to_string().contains("U16"), "{error}");
        let complex = Tensor::zeros([1], (Kind::ComplexFloat, Device::Cpu));
        let error = save_tensors(&path, &[("c".into(), complex)], &BTreeMap::new()).unwrap_err();
        assert!(error.to_string().contains("`c` in `"), "{error}");
    }
}
