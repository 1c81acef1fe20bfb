//! Adapters: configurations with impossible values, tensors of other kinds, names that lead elsewhere.

use super::case::{Case, hold};
use super::ground::Ground;

const CONFIG: &str = "adapter/adapter_config.json";
const FILE: &str = "adapter/adapter_model.safetensors";

fn key(key: &'static str, value: &'static str) -> Case {
    let make = move |ground: &Ground| {
        ground.with_adapter();
        ground.set_json(CONFIG, key, value);
    };
    Case::new(format!("{key} = {value}"), make).says(&["adapter_config.json", key])
}

#[test]
fn keys() {
    hold([
        key("r", "0"),
        key("r", "-4"),
        key("r", "9223372036854775808"),
        key("r", "\"4\""),
        key("lora_alpha", "true"),
        key("lora_alpha", "\"8\""),
        key("lora_alpha", "-1"),
        key("init_lora_weights", "\"unheard\""),
        key("loftq_config", "{\"loftq_bits\": 4}"),
        key("lora_dropout", "1.0"),
        key("lora_dropout", "-0.1"),
        key("target_modules", "[]"),
        key("target_modules", "[\"unheard_proj\"]"),
        key("target_modules", "7"),
        key("target_modules", "\"(((((\""),
        key("target_modules", "[\"../../q_proj\"]"),
        key("peft_type", "\"PREFIX_TUNING\""),
        key("peft_type", "7"),
        key("layers_to_transform", "[-1]"),
        key("rank_pattern", "{\"q_proj\": 0}"),
        key("rank_pattern", "{\"(a+)+$\": \"x\"}"),
        key("modules_to_save", "[\"unheard\"]"),
        key("fan_in_fan_out", "true"),
    ]);
}

/// The header of the adapter's tensors with a part replaced.
fn header(name: &str, from: &'static str, to: &'static str, word: &'static str) -> Case {
    let make = move |ground: &Ground| {
        ground.with_adapter();
        let bytes = ground.read(FILE);
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
        assert!(header.contains(from), "{header}");
        let header = header.replace(from, to);
        ground.write(FILE, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat());
    };
    Case::new(name, make).says(&["adapter_model.safetensors", word])
}

#[test]
fn tensors() {
    let whole = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    hold([
        header("integers", "\"F32\"", "\"I32\"", "I32"),
        header("unsigned integers", "\"F32\"", "\"U32\"", "U32"),
        header("a name that leads elsewhere", whole, "../../../etc/passwd", "passwd"),
        header("a tensor too much", whole, "base_model.model.model.layers.99.self_attn.q_proj.lora_A.weight", "layers.99"),
        header("another matrix", whole, "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight", "lora_C"),
        header("another rank", "[4,64]", "[64,4]", "64"),
        header("one axis", "[4,64]", "[256]", "256"),
    ]);
    let file = |name: &str, bytes: &'static [u8]| {
        let make = move |ground: &Ground| {
            ground.with_adapter();
            ground.write(FILE, bytes);
        };
        Case::new(name, make).says(&["adapter_model.safetensors"])
    };
    hold([
        file("no bytes", b""),
        file("no tensors", b"\x02\0\0\0\0\0\0\0{}"),
        file("a header of 2^64 - 1 bytes", b"\xff\xff\xff\xff\xff\xff\xff\xff{}"),
    ]);
    let none = |name: &'static str| {
        let make = move |ground: &Ground| {
            ground.with_adapter();
            ground.remove(&format!("adapter/{name}"));
        };
        Case::new(format!("an adapter without {name}"), make).says(&[name])
    };
    hold([none("adapter_config.json"), none("adapter_model.safetensors")]);
}
