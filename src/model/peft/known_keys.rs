//! Keys of `adapter_config.json` that ask for what is not built.

use serde_json::{Map, Value};

/// Keys of variants that are not built, or not with all of their values: these are. Of ways to begin, many change the weights of the base
/// model, too: without these the adapter means something else.
const ONLY_INERT: &[(&str, &[Inert])] = &[
    ("alora_invocation_tokens", &[Inert::Nothing]),
    ("arrow_config", &[Inert::Nothing]),
    ("bias", &[Inert::Text("none"), Inert::Text("lora_only"), Inert::Text("all")]),
    ("fan_in_fan_out", &[Inert::Nothing]),
    ("init_lora_weights", &[Inert::Nothing, Inert::Yes, Inert::Text("gaussian"), Inert::Text("eva"), Inert::Text("orthogonal")]),
    ("kasa_config", &[Inert::Nothing]),
    ("layer_replication", &[Inert::Nothing]),
    ("loftq_config", &[Inert::Nothing]),
    ("monteclora_config", &[Inert::Nothing]),
    ("peft_type", &[Inert::Text("LORA")]),
    ("task_type", &[Inert::Nothing, Inert::Text("CAUSAL_LM"), Inert::Text(SEQ_CLS)]),
    ("trainable_token_indices", &[Inert::Nothing]),
    ("use_bdlora", &[Inert::Nothing]),
    ("use_qalora", &[Inert::Nothing]),
    ("velora_config", &[Inert::Nothing]),
];

/// The value of `task_type` with which classes are predicted.
pub(super) const SEQ_CLS: &str = "SEQ_CLS";
/// The modules that PEFT saves with it.
pub(super) const CLASSIFIERS: [&str; 2] = ["classifier", "score"];

/// A value with which a key asks for nothing that is not built.
#[derive(Clone, Copy)]
pub(super) enum Inert {
    /// `null`, `false`, or an empty list, table or text.
    Nothing,
    Yes,
    Text(&'static str),
}

impl Inert {
    pub(super) fn is(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Nothing, Value::Null | Value::Bool(false)) | (Self::Yes, Value::Bool(true)) => true,
            (Self::Nothing, Value::Array(list)) => list.is_empty(),
            (Self::Nothing, Value::Object(table)) => table.is_empty(),
            (Self::Nothing, Value::String(text)) => text.is_empty(),
            (Self::Text(expected), Value::String(text)) => text.eq_ignore_ascii_case(expected),
            _ => false,
        }
    }
}

/// Settings that would change what the adapter computes and are not built, as `key = value`.
pub(super) fn refused(table: &Map<String, Value>) -> Vec<String> {
    let active = |(key, inert): &(&str, &[Inert])| {
        let value = table.get(*key)?;
        (!inert.iter().any(|inert| inert.is(value))).then(|| format!("`{key} = {value}`"))
    };
    ONLY_INERT.iter().filter_map(active).collect()
}
