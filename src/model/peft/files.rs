//! An adapter on disk as `peft` writes and reads it: two files in a directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tch::Tensor;

use super::PeftConfig;
use crate::files::{TensorFile, is_there, write_atomic};
use crate::model::families::own_name;
use crate::model::names::{PEFT_PREFIX, inner_module};
use crate::model::tensor_problems::is_float;
use crate::recipe::{ADAPTER_CONFIG, EXTRA_MODULES, EXTRA_TENSORS, extra_modules};
use crate::store::{pt_metadata, save_tensors};
use crate::units::{self, Fault, abridged, joined};

pub const ADAPTER_TENSORS: &str = "adapter_model.safetensors";

#[derive(Debug)]
pub struct PeftFiles {
    pub config: PeftConfig,
    /// The weights, by PEFT's names (`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`).
    pub tensors: TensorFile,
    /// What PEFT has no names for; its settings are among those in `config`.
    pub extra: Option<TensorFile>,
}

pub fn read_peft(dir: &Path) -> Result<PeftFiles, Fault> {
    let file = |name: &'static str| -> Result<PathBuf, Fault> {
        let path = dir.join(name);
        if is_there(&path) {
            return Ok(path);
        }
        let hint = "give the directory that holds `adapter_config.json` and `adapter_model.safetensors`; pickled `.bin` adapters are \
                    not read: load and save them once with a current `peft`";
        Err(Fault::data(format!("`{}` holds no PEFT adapter: `{name}` is missing", abridged(dir.display())), hint))
    };
    let mut config = PeftConfig::read(&file(ADAPTER_CONFIG)?)?;
    let tensors = TensorFile::open(&file(ADAPTER_TENSORS)?)?.renamed(current_name)?;
    let path = dir.join(EXTRA_TENSORS);
    let extra = if is_there(&path) { Some(TensorFile::open(&path)?) } else { None };
    if let Some(extra) = &extra {
        config.modules_to_save.extend(extra_modules(extra));
    }
    Ok(PeftFiles { config, tensors, extra })
}

/// What PEFT calls a tensor now: Transformers before 4.52 had a language model inside another one whole, output projection and all.
fn current_name(name: String) -> String {
    let inner = name.strip_prefix(PEFT_PREFIX).filter(|inner| inner.starts_with("language_model."));
    inner.and_then(|stored| own_name(stored, true)).map_or(name, |own| format!("{PEFT_PREFIX}{}", inner_module(&own)))
}

/// Writes into an existing directory what PEFT's files have no names for; `modules` of `modules_to_save` mean it.
pub(in crate::model) fn write_extra(dir: &Path, modules: Vec<String>, tensors: &[(String, Tensor)]) -> Result<(), Fault> {
    let mut metadata = pt_metadata();
    metadata.insert(EXTRA_MODULES.into(), serde_json::Value::from(modules).to_string());
    save_tensors(&dir.join(EXTRA_TENSORS), tensors, &metadata)
}

/// Writes an adapter into an existing directory.
pub(in crate::model) fn write_peft(dir: &Path, config: &PeftConfig, tensors: &[(String, Tensor)]) -> Result<(), Fault> {
    save_tensors(&dir.join(ADAPTER_TENSORS), tensors, &pt_metadata())?;
    write_atomic(&dir.join(ADAPTER_CONFIG), &config.to_json())
}

impl PeftFiles {
    pub(in crate::model) fn file_of(&self, name: &str) -> &TensorFile {
        self.extra.as_ref().filter(|extra| extra.contains(name)).unwrap_or(&self.tensors)
    }

    /// Checks that the file holds exactly the tensors `expected`; the error lists all that are missing, left over, of another shape, or of integers.
    pub fn check(&self, expected: &[(String, Vec<usize>)]) -> Result<(), Fault> {
        let by_name: BTreeMap<&str, &[usize]> = expected.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        let names = self.tensors.names().into_iter().chain(self.extra.iter().flat_map(TensorFile::names));
        let mut differences = Vec::new();
        for (name, shape) in expected {
            match self.file_of(name).get(name) {
                Err(_) => differences.push(format!("missing `{name}`")),
                Ok(found) if found.shape != shape => {
                    differences.push(format!("shape of `{name}`: expected {shape:?}, found {}", units::shape(found.shape)));
                }
                Ok(found) if !is_float(found.dtype) => {
                    differences.push(format!("`{name}` is {:?}, expected floats", found.dtype));
                }
                Ok(_) => {}
            }
        }
        let unexpected = names.filter(|name| !by_name.contains_key(name.as_str()));
        differences.extend(unexpected.map(|name| format!("unexpected `{name}`")));
        if differences.is_empty() {
            return Ok(());
        }
        let (path, differences) = (abridged(self.tensors.path().display()), joined(differences, "\n  "));
        let message = format!("`{path}` does not fit the model:\n  {differences}");
        Err(Fault::data(message, "check that the adapter was trained for this model"))
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::recipe::ModuleSet;

    fn adapter(dir: &Path) -> PeftFiles {
        let names = ModuleSet::Names(vec!["q_proj".into()]);
        let config = PeftConfig::plain(1, 2.0, 0.0, names);
        let zeros = |name: &str, shape: [i64; 2]| (name.to_owned(), Tensor::zeros(shape, (Kind::Float, Device::Cpu)));
        write_peft(dir, &config, &[zeros("a.lora_A.weight", [1, 3]), zeros("a.lora_B.weight", [2, 1])]).unwrap();
        read_peft(dir).unwrap()
    }

    #[test]
    fn an_adapter_is_read_back_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let files = adapter(dir.path());
        assert_eq!(files.tensors.metadata(), BTreeMap::from([("format".into(), "pt".into())]));
        assert_eq!(files.config.r, 1);
        files.check(&[("a.lora_A.weight".into(), vec![1, 3]), ("a.lora_B.weight".into(), vec![2, 1])]).unwrap();
    }

    #[test]
    fn all_differences_are_listed_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let files = adapter(dir.path());
        let error = files.check(&[("a.lora_A.weight".into(), vec![4, 3]), ("b.lora_A.weight".into(), vec![1])]).unwrap_err();
        let differences = [
            "shape of `a.lora_A.weight`: expected [4, 3], found [1, 3]",
            "missing `b.lora_A.weight`",
            "unexpected `a.lora_B.weight`",
        ];
        assert!(error.to_string().ends_with(&format!("does not fit the model:\n  {}", differences.join("\n  "))), "{error}");
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = |name: &str| {
            let error = read_peft(dir.path()).unwrap_err().to_string();
            assert!(error.ends_with(&format!("holds no PEFT adapter: `{name}` is missing")), "{error}");
        };
        missing(ADAPTER_CONFIG);
        adapter(dir.path());
        std::fs::remove_file(dir.path().join(ADAPTER_TENSORS)).unwrap();
        missing(ADAPTER_TENSORS);
    }
}
