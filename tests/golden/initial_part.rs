//! The initial part of prompts beside that of another program, which keeps it in its cache.

use std::path::{Path, PathBuf};

use kvtune::data::{DataRequest, ModelLimits, Tokenizer, open};
use kvtune::recipe::{DataRecipe, HeadRecipe, InitialPart, WrittenRegex};
use serde_json::{Value, json};
use tch::Tensor;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A JSONL file of the case's sequences: the inputs, and the last target behind them.
fn sequences(name: &str, dir: &Path) -> PathBuf {
    let tensors = Tensor::read_safetensors(fixture(&format!("golden/{name}.safetensors"))).unwrap();
    let sequences = |key: &str| {
        let tensor = &tensors.iter().find(|(name, _)| name == key).unwrap().1;
        (0..tensor.size()[0]).map(|sequence| Vec::<i64>::try_from(tensor.get(sequence)).unwrap()).collect::<Vec<_>>()
    };
    let line = |(mut ids, targets): (Vec<i64>, Vec<i64>)| {
        ids.push(*targets.last().unwrap());
        format!("{}\n", json!({"input_ids": ids, "labels": ids}))
    };
    let path = dir.join(format!("{name}.jsonl"));
    std::fs::write(&path, sequences("input_ids").into_iter().zip(sequences("targets")).map(line).collect::<String>()).unwrap();
    path
}

fn check(name: &str) {
    let how: Value = serde_json::from_str(&std::fs::read_to_string(fixture(&format!("golden/{name}.json"))).unwrap()).unwrap();
    let rule = InitialPart {
        end_regex: WrittenRegex::new(how["regex"].as_str().unwrap()).unwrap(),
        include_end_string: how["include_end_string"].as_bool().unwrap(),
        pad_id: how["pad_id"].as_u64().unwrap() as u32,
        range_is_prefix: how["range_is_prefix"].as_bool().unwrap(),
    };
    let dir = tempfile::tempdir().unwrap();
    let data = DataRecipe::of(sequences(name, dir.path()).into());
    let tokenizer = Tokenizer::load(&fixture("model-qwen2")).unwrap();
    let limits = ModelLimits { vocab_size: 512, trained_positions: 4096, computable_positions: 4096, pad: None };
    let head = HeadRecipe::NextToken;
    let tokenizer = Some(&tokenizer);
    let request = DataRequest { recipe: &data, head: &head, tokenizer, limits, initial: Some(&rule), seed: 1 };
    let splits = open(&request, &mut |_, _, _| {}).unwrap();
    let batch = splits.train.batch(&[0, 1]).unwrap();
    assert!(batch.sequences.iter().all(|sequence| sequence.inputs.len() == 96));

    let slots = how["cache_length"].as_u64().unwrap() as usize;
    let cap = ((slots as f64 * how["max_initial_fraction"].as_f64().unwrap()) as usize).max(1);
    let found: Vec<_> = batch
        .sequences
        .iter()
        .map(|sequence| sequence.initial.map(|(start, end)| (start, end.min(start + cap))).unwrap())
        .collect();
    let expected = how["protected_ranges_start_end_layer0"].as_array().unwrap();
    let number = |side: usize, sequence: usize| expected[side][sequence].as_u64().unwrap() as usize;
    assert_eq!(found, [0, 1].map(|sequence| (number(0, sequence), number(1, sequence))), "{name}");
}

#[test]
fn pads_belong_to_it() {
    check("smart-lastrec-prefix1-frac75");
}

#[test]
fn it_begins_behind_the_pads() {
    check("smart-lastrec-prefix0-frac75");
}
