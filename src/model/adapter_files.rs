//! Adapters as files in PEFT's format, and the matrices of a model.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::adapter::Adapter;
use super::check::check_io_layers;
use super::config::ModelConfig;
use super::io_layers::{TrainedCopies, base_name, copied_matrices, copies, copy_name};
use super::linear::A;
use super::names::{EMBEDDING, EMBEDDING_MODULE, INNER, OUTPUT, OUTPUT_MODULE, PEFT_PREFIX, SCORE, peft_tensor};
use super::peft::{ADAPTER_CONFIG, PeftConfig, PeftFiles, read_peft, refused_settings, write_extra, write_peft};
use super::targets::{LoraTarget, check_known, expression, targets, written};
use crate::ops::attention::accumulation_kind;
use crate::recipe::{InitLora, ModuleSet};
use crate::store::load_tensor;
use crate::units::{Fault, FaultKind, abridged, quoted};

impl Adapter {
    /// Reads a PEFT adapter for a model that computes in `kind`. Its ranks, scales, dropout and targets are the adapter's own;
    /// whether they agree with a recipe is the caller's to decide.
    pub fn load_peft(dir: &Path, config: &ModelConfig, kind: Kind, device: Device) -> Result<Self, Fault> {
        let mut files = read_peft(dir)?;
        // An adapter of the language model by itself fits, too.
        files.config.is_inner = config.is_inner && files.tensors.names().iter().any(|name| name.contains(INNER));
        add_what_the_file_holds(config, &mut files)?;
        let refused = |error: Fault| refused_settings(&dir.join(ADAPTER_CONFIG), &[error.to_string().replace("`lora.", "`")]);
        let (targets, is_inner) = (targets(config, &files.config).map_err(refused)?, files.config.is_inner);
        if targets.is_empty() {
            check_known(config, &files.config).map_err(refused)?;
        }
        let of_file = |error: Fault| if error.kind() == FaultKind::BadSetting { refused(error) } else { error };
        let parts = |target: &LoraTarget| {
            target.parts(&files.config).into_iter().map(|(part, shape)| (target.tensor(part), shape)).collect()
        };
        check_io_layers(config, &files.config).map_err(of_file)?;
        let of_copies = copies(config, &files.config)?.into_iter().map(|(name, shape)| (copy_name(&name, is_inner), shape));
        // PEFT saves embedding and output projection with an addition to them, unless it is told not to.
        let is_target = |layer: &&str| targets.iter().any(|target| target.linear.name == *layer);
        let bases = [EMBEDDING_MODULE, OUTPUT_MODULE].into_iter().filter(is_target);
        let bases = bases.map(|layer| (layer, base_name(layer, is_inner)));
        let bases: Vec<_> = bases.filter(|(_, name)| files.tensors.contains(name)).collect();
        let of_bases = bases.iter().map(|(_, name)| (name.clone(), vec![config.vocab_size, config.hidden_size]));
        files.check(&targets.iter().flat_map::<Vec<_>, _>(parts).chain(of_copies).chain(of_bases).collect::<Vec<_>>())?;
        // Copied, because training writes into the matrices, and a file's memory must not be written to.
        let load = |name: &str| Ok::<_, Fault>(load_finite(&files, name)?.to_kind(accumulation_kind(kind)).copy());
        let base = |(layer, name): (&'static str, String)| Ok::<_, Fault>((layer, load_finite(&files, &name)?));
        let bases = bases.into_iter().map(base).collect::<Result<_, _>>()?;
        let mut copies = TrainedCopies::new(config, &files.config, |name, _| load(&copy_name(name, is_inner)))?;
        copies.bases = bases;
        let load = |target: &LoraTarget, part: &str, _: &[i64]| load(&target.tensor(part));
        let adapter = Self::of_targets(config, files.config.clone(), &targets, copies, load).map_err(of_file)?;
        Ok(adapter.moved_to(kind, device))
    }

    /// The model with the classes that a PEFT adapter scores; any other adapter leaves it as it is.
    pub fn classes_of(dir: &Path, config: ModelConfig) -> Result<ModelConfig, Fault> {
        let files = read_peft(dir)?;
        if !files.config.is_classifier || config.num_classes.is_some() {
            return Ok(config);
        }
        let score = files.tensors.get(&copy_name(SCORE, false))?;
        Ok(config.with_classes(score.shape.first().copied()))
    }

    /// Writes the adapter into a directory that exists, in PEFT's format; what PEFT has no names for goes into a file of its own beside.
    /// `base_model` is the name or path of the model.
    pub fn save_peft(&self, dir: &Path, base_model: &str) -> Result<(), Fault> {
        let plain = (self.settings.init == InitLora::Pissa).then(|| self.without_pissa());
        let adapter = plain.as_ref().unwrap_or(self);
        let mut settings = PeftConfig { base_model: Some(base_model.into()), revision: None, ..written(&adapter.settings)? };
        let bases =
            adapter.copies.bases.iter().map(|(layer, base_ve)| (base_name(layer, settings.is_inner), base_ve.shallow_clone()));
        let all = adapter.parameters().into_iter().chain(bases);
        let (tensors, extra): (Vec<_>, Vec<_>) = all.partition(|(name, _)| name.starts_with(PEFT_PREFIX));
        if !extra.is_empty() {
            let means_extra = |module: &String| extra.iter().any(|(name, _)| name.ends_with(module.as_str()));
            let (modules, saved): (Vec<String>, _) = settings.modules_to_save.into_iter().partition(means_extra);
            settings.modules_to_save = saved;
            write_extra(dir, modules, &extra)?;
        }
        write_peft(dir, &settings, &tensors)
    }
}

/// Names in the settings what an adapter's file has of embedding and output projection and they do not. PEFT writes both whole where it is
/// told to, and both ends of a tied model where one is trained for both; it reads them in any case.
fn add_what_the_file_holds(
    config: &ModelConfig,
    PeftFiles { config: settings, tensors, .. }: &mut PeftFiles,
) -> Result<(), Fault> {
    let named = copied_matrices(config, settings);
    let ends = [(EMBEDDING, "embed_tokens"), (OUTPUT, OUTPUT_MODULE)];
    let mut whole = ends.to_vec();
    whole.retain(|(name, _)| tensors.contains(&copy_name(name, settings.is_inner)));
    // Of a tied model one alone would be both in PEFT.
    if !config.tie_word_embeddings || whole.len() == ends.len() {
        whole.retain(|(name, _)| !named.iter().any(|(other, _)| other == name));
        settings.has_unnamed = !whole.is_empty();
        settings.modules_to_save.extend(whole.iter().map(|(_, module)| (*module).to_owned()));
    }
    let is_tied = settings.ties_output && tensors.contains(&peft_tensor(OUTPUT_MODULE, A));
    match &mut settings.target_modules {
        ModuleSet::Names(names) if is_tied => names.push(OUTPUT_MODULE.to_owned()),
        ModuleSet::Matching(regex) if is_tied => {
            settings.target_modules = expression(&format!("{OUTPUT_MODULE}|(?:{})", regex.written()))?;
        }
        _ => {}
    }
    settings.ties_output = false;
    Ok(())
}

fn load_finite(files: &PeftFiles, name: &str) -> Result<Tensor, Fault> {
    let file = files.file_of(name);
    let tensor = load_tensor(file, name)?;
    if tensor.isfinite().all().int64_value(&[]) != 0 {
        return Ok(tensor);
    }
    let message = format!("`{}`: `{}` is infinite or not a number somewhere", abridged(file.path().display()), quoted(name));
    Err(Fault::data(message, "take the adapter from its source again, or an earlier one").of_kind(FaultKind::Damaged))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use serde_json::{Map, Value, json};

    use super::*;
    use crate::files::{TensorFile, read_json};
    use crate::model::Model;
    use crate::model::peft::{ADAPTER_TENSORS, EXTRA_TENSORS};
    use crate::recipe::{Dtype, LoraRecipe, TrainedBias};

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    fn model() -> ModelConfig {
        ModelConfig::load(&fixture("model-qwen2")).unwrap()
    }

    fn load(dir: &Path) -> Result<Adapter, Fault> {
        Adapter::load_peft(dir, &model(), Kind::Float, Device::Cpu)
    }

    /// A copy of the fixture with some keys of its configuration changed.
    fn changed(changes: &Value) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(fixture("adapter-qwen2").join(ADAPTER_TENSORS), dir.path().join(ADAPTER_TENSORS)).unwrap();
        let mut object: Map<String, Value> = read_json(&fixture("adapter-qwen2").join(ADAPTER_CONFIG)).unwrap();
        object.extend(changes.as_object().unwrap().clone());
        fs::write(dir.path().join(ADAPTER_CONFIG), Value::Object(object).to_string()).unwrap();
        dir
    }

    #[test]
    fn what_is_written_is_read_again_with_the_names_shapes_and_keys_of_peft() {
        let dir = tempfile::tempdir().unwrap();
        let adapter = load(&fixture("adapter-qwen2")).unwrap();
        assert_eq!((adapter.settings.r, adapter.settings.lora_alpha.to_string(), adapter.targets().len()), (4, "8".into(), 7));
        adapter.save_peft(dir.path(), "model-qwen2").unwrap();
        for ((name, written), (other, read)) in adapter.parameters().iter().zip(load(dir.path()).unwrap().parameters()) {
            assert_eq!((name, written), (&other, &read));
        }
        let headers = |dir: &Path| {
            let file = TensorFile::open(&dir.join(ADAPTER_TENSORS)).unwrap();
            let entry = |name: &String| file.get(name).map(|view| (name.clone(), view.dtype, view.shape.to_vec())).unwrap();
            let mut entries: Vec<_> = file.names().iter().map(entry).collect();
            entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
            entries
        };
        assert_eq!(headers(dir.path()), headers(&fixture("adapter-qwen2")));
        let theirs: Value = read_json(&fixture("adapter-qwen2").join(ADAPTER_CONFIG)).unwrap();
        for (key, value) in read_json::<Map<String, Value>>(&dir.path().join(ADAPTER_CONFIG)).unwrap() {
            if key != "target_modules" {
                assert_eq!(value, theirs[&key], "{key}");
            }
        }
    }

    #[test]
    fn an_adapter_with_settings_by_linear_is_written_as_it_was_read() {
        for (kind, keys) in [
            ("adapter-qwen2-rslora", &["r", "use_rslora"][..]),
            ("adapter-qwen2-patterns", &["rank_pattern", "alpha_pattern", "exclude_modules"]),
            ("adapter-qwen2-regex", &["target_modules"]),
            ("adapter-qwen2-layers", &["layers_to_transform", "layers_pattern"]),
            ("adapter-qwen2-lorabias", &["lora_bias"]),
            ("adapter-qwen2-biasloraonly", &["bias"]),
            ("adapter-qwen2-dora", &["use_dora"]),
            ("adapter-qwen2-lmhead", &["modules_to_save", "target_modules"]),
            ("adapter-qwen2-loralmhead", &["rank_pattern", "alpha_pattern"]),
            ("adapter-qwen2-biasall", &["bias", "target_modules"]),
            ("adapter-qwen2-norms", &["modules_to_save", "target_modules"]),
            ("adapter-qwen2-embed", &["modules_to_save", "task_type"]),
            ("adapter-qwen2-loraembed", &["r", "task_type"]),
            ("adapter-qwen2-seqcls", &["modules_to_save", "task_type"]),
        ] {
            let (theirs, ours) = (fixture("families").join(kind), tempfile::tempdir().unwrap());
            let classes = kind.ends_with("seqcls").then_some(4);
            let config = ModelConfig::load(&fixture("model-qwen2")).unwrap().with_classes(classes);
            let load = |dir: &Path| Adapter::load_peft(dir, &config, Kind::Float, Device::Cpu);
            // Through a model, whose linears and ends take the matrices.
            let model = Model::random(config.clone(), Dtype::F32, Device::Cpu, 1).unwrap().with_adapter(load(&theirs).unwrap());
            model.save_trained(ours.path(), "model-qwen2").unwrap();
            let [written, read] = [ours.path(), &theirs].map(|dir| read_json::<Value>(&dir.join(ADAPTER_CONFIG)).unwrap());
            for &key in keys {
                assert_eq!(written[key], read[key], "{kind}: {key}");
            }
            assert_eq!(load(ours.path()).unwrap().parameters(), load(&theirs).unwrap().parameters(), "{kind}");
            let names = |dir: &Path| {
                let mut names = TensorFile::open(&dir.join(ADAPTER_TENSORS)).unwrap().names();
                names.sort();
                names
            };
            assert_eq!(names(ours.path()), names(&theirs), "{kind}");
        }
    }

    /// PEFT 0.21 writes the same tensors for either word where no other linear has a bias, and computes the same; those of others are
    /// copies.
    #[test]
    fn all_biases_are_those_of_the_targets_and_of_other_linears() {
        let config = ModelConfig::load(&fixture("model-qwen2")).unwrap();
        let names = |names: &[&str]| ModuleSet::Names(names.iter().map(|&name| name.into()).collect());
        let adapter = |bias, targets| {
            let lora = LoraRecipe { bias, ..LoraRecipe::plain(2, 4.0, 0.0, targets) };
            Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu)
        };
        let [all, own] = [TrainedBias::All, TrainedBias::LoraOnly].map(|bias| adapter(bias, ModuleSet::AllLinear).unwrap());
        let dir = tempfile::tempdir().unwrap();
        all.save_peft(dir.path(), "model").unwrap();
        assert_eq!(read_json::<Value>(&dir.path().join(ADAPTER_CONFIG)).unwrap()["bias"], json!("all"));
        let read = load(dir.path()).unwrap();
        assert_eq!((read.settings.bias, read.parameters()), (TrainedBias::All, own.parameters()));
        let of_others = adapter(TrainedBias::All, names(&["q_proj", "k_proj"])).unwrap().parameters();
        assert!(of_others.iter().any(|(name, _)| name == "base_model.model.model.layers.2.self_attn.v_proj.bias"));
    }

    /// PEFT 0.21 loads the same adapter under each of these names of its list of layers, with the same logits.
    #[test]
    fn layers_are_counted_where_the_pattern_says() {
        let theirs = fixture("families").join("adapter-qwen2-layers");
        let config = ModelConfig::load(&fixture("model-qwen2")).unwrap();
        let with = |pattern: Value| {
            let dir = tempfile::tempdir().unwrap();
            fs::copy(theirs.join(ADAPTER_TENSORS), dir.path().join(ADAPTER_TENSORS)).unwrap();
            let mut object: Map<String, Value> = read_json(&theirs.join(ADAPTER_CONFIG)).unwrap();
            object.insert("layers_pattern".into(), pattern);
            fs::write(dir.path().join(ADAPTER_CONFIG), Value::Object(object).to_string()).unwrap();
            dir
        };
        let load = |dir: &Path| Adapter::load_peft(dir, &config, Kind::Float, Device::Cpu);
        let own = load(&theirs).unwrap();
        for pattern in [json!("lay.*"), json!(["h", "layers"]), json!(["layers"]), Value::Null] {
            let (dir, again) = (with(pattern.clone()), tempfile::tempdir().unwrap());
            let read = load(dir.path()).unwrap();
            assert_eq!(read.parameters(), own.parameters(), "{pattern}");
            read.save_peft(again.path(), "model").unwrap();
            let written = read_json::<Value>(&again.path().join(ADAPTER_CONFIG)).unwrap()["layers_pattern"].take();
            let usual = pattern.is_null() || pattern == json!(["layers"]);
            assert_eq!(written, if usual { json!("layers") } else { pattern });
        }
        assert!(load(with(json!("h")).path()).is_err(), "tensors of layers that are none");
        assert!(load(with(json!("(layers)")).path()).unwrap_err().to_string().contains("without groups"));
        let lora = LoraRecipe {
            layers_pattern: vec!["layers".into()],
            layers_to_transform: own.settings.layers_to_transform.clone(),
            ..LoraRecipe::plain(2, 4.0, 0.0, ModuleSet::AllLinear)
        };
        assert!(Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu).is_ok());
        for (layers, expected) in [(vec![], "without `layers_to_transform`"), (vec![0], "a name of the list of layers")] {
            let other = LoraRecipe { layers_pattern: vec!["h".into()], layers_to_transform: layers, ..lora.clone() };
            let error = Adapter::new(&config, &other, 1, Kind::Float, Device::Cpu).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn adapters_of_experts_and_routers_are_written_as_peft_does() {
        for family in ["mixtral", "gpt-oss", "glm4-moe"] {
            let (theirs, ours) = (fixture("families").join(format!("adapter-{family}")), tempfile::tempdir().unwrap());
            let config = ModelConfig::load(&fixture("families").join(format!("model-{family}"))).unwrap();
            let adapter = Adapter::load_peft(&theirs, &config, Kind::Float, Device::Cpu).unwrap();
            adapter.save_peft(ours.path(), "model").unwrap();
            let tensors = |dir: &Path| {
                let file = TensorFile::open(&dir.join(ADAPTER_TENSORS)).unwrap();
                let mut all = crate::store::load_tensors(&file).unwrap();
                all.sort_by(|a, b| a.0.cmp(&b.0));
                all
            };
            assert_eq!(tensors(ours.path()), tensors(&theirs), "{family}");
            let targets = [ours.path(), &theirs].map(|dir| {
                let config = read_json::<Value>(&dir.join(ADAPTER_CONFIG)).unwrap();
                let names = config["target_parameters"].as_array().unwrap();
                names.iter().map(|name| name.as_str().unwrap().to_owned()).collect::<std::collections::BTreeSet<_>>()
            });
            assert_eq!(targets[0], targets[1], "{family}");
        }
    }

    /// PEFT calls the modules of a language model otherwise where it is inside another one, whose eyes may have modules of the same names.
    #[test]
    fn an_adapter_inside_a_model_that_sees_is_called_as_there() {
        let inner: Value = read_json(&fixture("model-qwen2").join("config.json")).unwrap();
        let outer = json!({"model_type": "gemma3", "text_config": inner, "vision_config": {}});
        let config = ModelConfig::from_object(outer.as_object().unwrap()).unwrap();
        let names = ModuleSet::Names(vec!["q_proj".into(), "mlp.up_proj".into()]);
        let lora = LoraRecipe { layers_to_transform: vec![0, 2], ..LoraRecipe::plain(2, 4.0, 0.0, names) };
        let adapter = Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu).unwrap();
        let dir = tempfile::tempdir().unwrap();
        adapter.save_peft(dir.path(), "model").unwrap();
        let first = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight";
        assert_eq!((adapter.parameters().len(), adapter.parameters()[0].0.as_str()), (8, first));
        let written: Value = read_json(&dir.path().join(ADAPTER_CONFIG)).unwrap();
        let expression = r"model\.language_model\.layers\.(?:0|2)\.(?:.*\.)?(?:q_proj|up_proj)";
        assert_eq!((&written["target_modules"], &written["layers_to_transform"]), (&json!(expression), &Value::Null));
        let read = Adapter::load_peft(dir.path(), &config, Kind::Float, Device::Cpu).unwrap();
        assert_eq!(read.parameters(), adapter.parameters());
        // As Transformers before 4.52 called them.
        let file = TensorFile::open(&dir.path().join(ADAPTER_TENSORS)).unwrap();
        let before = file.renamed(|name| name.replace("model.language_model.", "language_model.model.")).unwrap();
        let tensors = crate::store::load_tensors(&before).unwrap();
        crate::store::save_tensors(&dir.path().join(ADAPTER_TENSORS), &tensors, &std::collections::BTreeMap::new()).unwrap();
        let read = Adapter::load_peft(dir.path(), &config, Kind::Float, Device::Cpu).unwrap();
        assert_eq!(read.parameters(), adapter.parameters());
        // One layer of a linear, whole.
        let names = ["model.language_model.layers.1.mlp.down_proj", "q_proj"].map(String::from).to_vec();
        let lora = LoraRecipe { target_modules: ModuleSet::Names(names), ..lora };
        let one = Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu).unwrap();
        one.save_peft(dir.path(), "model").unwrap();
        let written: Value = read_json(&dir.path().join(ADAPTER_CONFIG)).unwrap();
        let expression = r"model\.language_model\.(?:layers\.1\.mlp\.down_proj|layers\.(?:0|2)\.(?:.*\.)?(?:q_proj))";
        assert_eq!(written["target_modules"], json!(expression));
        let read = Adapter::load_peft(dir.path(), &config, Kind::Float, Device::Cpu).unwrap();
        assert_eq!(read.parameters(), one.parameters());
        // That of the language model by itself keeps its names.
        let own = Adapter::load_peft(&fixture("adapter-qwen2"), &config, Kind::Float, Device::Cpu).unwrap();
        assert_eq!(own.parameters(), load(&fixture("adapter-qwen2")).unwrap().parameters());
    }

    /// The fixture with other tensors and keys.
    fn with_tensors(changes: &Value, change: impl Fn(&mut Vec<(String, Tensor)>)) -> tempfile::TempDir {
        let (dir, from) = (changed(changes), fixture("adapter-qwen2").join(ADAPTER_TENSORS));
        let mut tensors = crate::store::load_tensors(&TensorFile::open(&from).unwrap()).unwrap();
        change(&mut tensors);
        crate::store::save_tensors(&dir.path().join(ADAPTER_TENSORS), &tensors, &std::collections::BTreeMap::new()).unwrap();
        dir
    }

    /// PEFT writes them where it is told to (`save_embedding_layers`) or trains one for both (`ensure_weight_tying`), and reads them.
    #[test]
    fn what_a_file_has_whole_or_twice_is_read() {
        let ones = |shape: [i64; 2]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
        let io_layer = |layer: &str, part: &str, shape| (peft_tensor(layer, part), ones(shape));
        let whole = |all: &mut Vec<_>| {
            all.extend(["model.embed_tokens", "lm_head"].map(|layer| io_layer(layer, "weight", [512, 64])));
        };
        let twice = |all: &mut Vec<_>| {
            all.push(io_layer("model.embed_tokens", "lora_embedding_A", [4, 512]));
            all.push(io_layer("model.embed_tokens", "lora_embedding_B", [64, 4]));
            all.extend([io_layer("lm_head", "lora_A.weight", [4, 64]), io_layer("lm_head", "lora_B.weight", [512, 4])]);
        };
        let names = json!(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "model.embed_tokens"]);
        for (dir, saved, more) in [
            (with_tensors(&json!({}), whole), &["embed_tokens", "lm_head"][..], 2),
            (with_tensors(&json!({"modules_to_save": ["model.embed_tokens"]}), whole), &["model.embed_tokens", "lm_head"], 2),
            (with_tensors(&json!({"target_modules": names, "ensure_weight_tying": true}), twice), &[], 4),
            (with_tensors(&json!({"target_modules": ".*(_proj|embed_tokens)", "ensure_weight_tying": true}), twice), &[], 4),
        ] {
            let (read, again) = (load(dir.path()).unwrap(), tempfile::tempdir().unwrap());
            assert_eq!(
                (&read.settings.modules_to_save[..], read.parameters().len()),
                (&saved.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()[..], 42 + more)
            );
            read.save_peft(again.path(), "model").unwrap();
            assert_eq!(load(again.path()).unwrap().parameters(), read.parameters());
            // To train them is no choice that the file has made.
            let lora = LoraRecipe::plain(4, 8.0, 0.0, ModuleSet::AllLinear);
            let key = if saved.is_empty() { "target_modules" } else { "modules_to_save" };
            let error = read.check_agreement(&model(), &lora, dir.path()).unwrap_err();
            let (message, hint) = (error.to_string(), error.hint().unwrap());
            assert!(format!("{message} {hint}").contains(&format!("`lora.{key}")), "{message} {hint}");
            assert_eq!(message.contains("its settings do not name all of these"), !saved.is_empty(), "{message}");
            let lora = LoraRecipe { modules_to_save: read.settings.modules_to_save.clone(), ..lora };
            assert_eq!(read.check_agreement(&model(), &lora, dir.path()).is_ok(), !saved.is_empty());
        }
        let one = |all: &mut Vec<_>| all.push(io_layer("lm_head", "weight", [512, 64]));
        for (dir, left) in
            [(with_tensors(&json!({"target_modules": names}), twice), "lora_A.weight"), (with_tensors(&json!({}), one), "weight")]
        {
            let error = load(dir.path()).unwrap_err().to_string();
            assert!(error.contains(&format!("unexpected `base_model.model.lm_head.{left}`")), "{error}");
        }
    }

    /// As in PEFT, however it is meant; in a recipe of a new adapter a name that is meant so is a mistake.
    #[test]
    fn what_is_saved_whole_is_no_target() {
        let projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        let with = |name: &str| json!(projections.iter().copied().chain([name]).collect::<Vec<_>>());
        for (saved, layer, targets) in [
            ("lm_head", "lm_head", with("lm_head")),
            ("lm_head", "lm_head", json!(".*(_proj|lm_head)")),
            ("model.embed_tokens", "model.embed_tokens", with("embed_tokens")),
            ("embed_tokens", "model.embed_tokens", with("model.embed_tokens")),
            ("embed_tokens", "model.embed_tokens", json!(".*(_proj|embed_tokens)")),
        ] {
            let changes = json!({"target_modules": targets, "modules_to_save": [saved]});
            let whole = (peft_tensor(layer, "weight"), Tensor::ones([512, 64], (Kind::Float, Device::Cpu)));
            let dir = with_tensors(&changes, |all| all.push((whole.0.clone(), whole.1.shallow_clone())));
            let (read, again) = (load(dir.path()).unwrap(), tempfile::tempdir().unwrap());
            assert_eq!((read.deltas.len(), read.copies.parameters()), (21, vec![whole]), "{changes}");
            read.save_peft(again.path(), "model").unwrap();
            assert_eq!(load(again.path()).unwrap().parameters(), read.parameters(), "{changes}");
            let is_named = targets.is_array();
            let lora = LoraRecipe {
                modules_to_save: vec![saved.to_owned()],
                ..LoraRecipe::plain(4, 8.0, 0.0, serde_json::from_value(targets).unwrap())
            };
            assert!(read.check_agreement(&model(), &lora, dir.path()).is_ok(), "{changes}");
            match Adapter::new(&model(), &lora, 1, Kind::Float, Device::Cpu) {
                Ok(adapter) => assert!(!is_named && adapter.parameters().len() == 43),
                Err(error) => assert!(is_named && error.to_string().ends_with("where `target_modules` has it"), "{error}"),
            }
        }
    }

    #[test]
    fn numbers_that_are_not_finite_are_named() {
        for bad in [f64::NAN, f64::INFINITY] {
            let dir = with_tensors(&json!({}), |all| all[3].1 = all[3].1.full_like(bad));
            let error = load(dir.path()).unwrap_err().to_string();
            assert!(error.contains(ADAPTER_TENSORS) && error.ends_with("is infinite or not a number somewhere"), "{error}");
        }
    }

    #[test]
    fn all_misfits_are_reported_at_once() {
        let error = load(changed(&json!({"r": 8})).path()).unwrap_err();
        let first = "layers.0.self_attn.q_proj.lora_A.weight`: expected [8, 64], found [4, 64]";
        assert!(error.to_string().contains(first) && error.to_string().ends_with("… and 22 more"), "{error}");
        let error = load(changed(&json!({"target_modules": ["q_proj"]})).path()).unwrap_err();
        assert!(error.to_string().ends_with("… and 16 more"), "{error}");
        let error = load(changed(&json!({"target_modules": ["wq"]})).path()).unwrap_err();
        assert!(error.to_string().contains("adapter_config.json`") && error.to_string().contains("unknown name `wq`"), "{error}");
        let error = load(changed(&json!({"layers_to_transform": [0, 1, 2, 9]})).path()).unwrap_err();
        let key = "adapter_config.json` asks for what is not supported: `layers_to_transform` is [0, 1, 2, 9], expected ";
        assert!(error.to_string().contains(key) && !error.hint().unwrap().contains("recipe"), "{error}");
    }

    /// Dense layers and experts may have linears of one name: what is written means those that were meant.
    #[test]
    fn an_adapter_of_experts_and_a_dense_layer_is_read_again() {
        let object = json!({
            "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 8, "intermediate_size": 20, "moe_intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2,
            "mlp_only_layers": [1], "vocab_size": 11, "max_position_embeddings": 64, "attention_bias": true,
        });
        let config = ModelConfig::from_object(object.as_object().unwrap()).unwrap();
        let lora = |targets, parameters: &[&str]| LoraRecipe {
            target_parameters: parameters.iter().map(|&name| name.into()).collect(),
            ..LoraRecipe::plain(2, 4.0, 0.0, targets)
        };
        let names = |names: &[&str]| ModuleSet::Names(names.iter().map(|&name| name.into()).collect());
        for lora in [
            lora(ModuleSet::AllLinear, &[]),
            lora(ModuleSet::AllLinear, &["gate_up_proj", "gate.weight"]),
            lora(names(&["q_proj"]), &["experts.down_proj"]),
            lora(names(&["q_proj", "mlp.up_proj"]), &["experts.gate_up_proj"]),
            lora(names(&["gate_proj", "down_proj", "gate"]), &[]),
            LoraRecipe { bias: TrainedBias::All, ..lora(names(&["q_proj", "gate_proj"]), &[]) },
        ] {
            let dir = tempfile::tempdir().unwrap();
            let adapter = Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu).unwrap();
            adapter.save_peft(dir.path(), "model").unwrap();
            let read = Adapter::load_peft(dir.path(), &config, Kind::Float, Device::Cpu).unwrap();
            assert_eq!(adapter.parameters(), read.parameters(), "{lora:?}");
        }
        for (lora, key) in [
            (lora(names(&["gate_proj"]), &["experts.gate_up_proj"]), "target_parameters"),
            (lora(names(&["gate"]), &["gate.weight"]), "target_parameters"),
            (LoraRecipe { dropout: 0.1, ..lora(ModuleSet::AllLinear, &[]) }, "dropout"),
        ] {
            let error = Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu).unwrap_err();
            assert!(error.to_string().starts_with(&format!("`lora.{key}` is ")), "{error}");
        }
    }

    #[test]
    fn all_linear_is_every_projection() {
        assert_eq!(load(changed(&json!({"target_modules": "all-linear"})).path()).unwrap().targets().len(), 7);
    }

    /// PEFT trains modules, and the sinks of gpt-oss are a parameter of one: its files stay as PEFT reads them, and these lie beside.
    #[test]
    fn what_peft_has_no_name_for_is_saved_beside_its_files() {
        let home = fixture("families").join("model-gpt-oss");
        let base = || Model::load(&home, Dtype::F32, Device::Cpu).unwrap();
        let saved = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let lora = |names: &[&str]| LoraRecipe {
            modules_to_save: saved(names),
            ..LoraRecipe::plain(2, 4.0, 0.0, ModuleSet::Names(vec!["q_proj".into()]))
        };
        let lora = lora(&["sinks", "model.norm"]);
        let config = base().config().clone();
        let mut model = base().with_adapter(Adapter::new(&config, &lora, 1, Kind::Float, Device::Cpu).unwrap());
        let is_sink = |(name, _): &(String, Tensor)| name.ends_with("self_attn.sinks");
        let sinks: Vec<_> = model.parameters().into_iter().filter(is_sink).collect();
        assert_eq!((sinks.len(), sinks[0].0.as_str()), (config.num_layers(), "model.layers.0.self_attn.sinks"));
        let began = model.layers[0].copyable_mut().find(|vector| vector.name.ends_with("sinks")).unwrap();
        assert!(began.own.equal(&sinks[0].1) && sinks[0].1.requires_grad(), "as the model has it");
        tch::no_grad(|| sinks.iter().for_each(|(_, leaf)| drop(leaf.shallow_clone().g_add_scalar_(0.5))));

        let dir = tempfile::tempdir().unwrap();
        model.save_trained(dir.path(), "model").unwrap();
        let names = |name: &str| TensorFile::open(&dir.path().join(name)).unwrap().names();
        assert!(names(ADAPTER_TENSORS).iter().all(|name| name.starts_with("base_model.model.") && !name.contains("sinks")));
        assert_eq!(names(EXTRA_TENSORS).len(), sinks.len());
        let written = read_json::<Value>(&dir.path().join(ADAPTER_CONFIG)).unwrap();
        assert_eq!(written["modules_to_save"], json!(["model.norm"]));
        // A recipe that leaves the keys out trains the same.
        let text = format!("model = {{path = '.', adapter = '{}'}}\n[lora]\nr = {}\n", dir.path().display(), lora.r)
            + "[data]\nformat = 'tokens'\ntrain = 't'\n[kv_cache]\ncache_length = 8\nchunk_size = 4";
        let recipe = crate::recipe::Recipe::parse(text, "r.toml".as_ref(), &[]).unwrap().recipe;
        assert_eq!(recipe.lora.unwrap().modules_to_save, ["model.norm", "sinks"]);
        let read = || Adapter::load_peft(dir.path(), &config, Kind::Float, Device::Cpu).unwrap();
        assert!(read().has_extra_tensors() && !load(&fixture("adapter-qwen2")).unwrap().has_extra_tensors());
        read().check_agreement(&config, &lora, dir.path()).unwrap();
        let sorted = |mut all: Vec<(String, Tensor)>| {
            all.sort_by(|a, b| a.0.cmp(&b.0));
            all
        };
        assert_eq!(sorted(read().parameters()), sorted(model.parameters()));

        // Merged, they are weights of the model.
        let out = dir.path().join("merged");
        crate::model::MergedModel::open(&home, Some(read())).unwrap().write(&out, &|| true).unwrap();
        let merged = Model::load_to_train(&out, Dtype::F32, Device::Cpu).unwrap().parameters();
        for (name, leaf) in &sinks {
            assert!(merged.iter().any(|(other, tensor)| other == name && tensor.equal(leaf)), "{name}");
        }
        // A tensor that the model does not have is none of it.
        let stranger = [("model.layers.9.self_attn.sinks".to_owned(), Tensor::zeros([4], (Kind::Float, Device::Cpu)))];
        crate::store::save_tensors(&dir.path().join(EXTRA_TENSORS), &stranger, &std::collections::BTreeMap::new()).unwrap();
        let error = Adapter::load_peft(dir.path(), &config, Kind::Float, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("layers.9"), "{error}");
    }
}
