//! The recipe as a JSON Schema (draft 7), for editors: every key with its type, its meaning, and what other programs call it.

use serde_json::{Map, Value, json};

use super::alias::FLAT;
use super::plan::dotted_keys;
use super::read::AUTO;
use super::table::RecipeKey;

/// The schema that stands in `docs/reference/recipe.schema.json`.
pub fn schema() -> Value {
    let mut root = table("A recipe of kvtune");
    for (to, key) in dotted_keys() {
        put(&mut root, &to, property(key));
        for other in key.text.also {
            put(&mut root, other, json!({ "description": format!("Read as `{to}`."), "deprecated": true }));
        }
    }
    for key in FLAT.iter().chain(&["name"]) {
        let other = json!({ "description": "Read as a part of `kv_cache.policy`.", "deprecated": true });
        put(&mut root, &format!("kv_cache.{key}"), other);
    }
    root["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    root
}

fn property(key: &RecipeKey) -> Value {
    let mut value = (key.schema)();
    if let Some(words) = value.get_mut("enum").and_then(Value::as_array_mut) {
        words.extend(key.text.words.iter().flat_map(|(_, others)| *others).map(|word| Value::from(*word)));
    }
    if key.text.may_be_auto {
        value = json!({ "anyOf": [value, { "const": AUTO }] });
    }
    value["description"] = format!("{} Takes: {}. Default: {}.", key.text.meaning.trim(), key.takes, key.default).into();
    value
}

/// Puts a key into the table that its dotted name says, unless it is there.
fn put(root: &mut Value, key: &str, property: Value) {
    let (outer, key) = key.split_once('.').map_or((None, key), |(outer, key)| (Some(outer), key));
    let properties = &mut root["properties"];
    if let Some(outer) = outer {
        if properties.get(outer).is_none() {
            properties[outer] = table(&format!("The table `[{outer}]`."));
        }
        put(&mut properties[outer], key, property);
    } else if properties.get(key).is_none() {
        properties[key] = property;
    }
}

fn table(description: &str) -> Value {
    json!({ "description": description, "type": "object", "additionalProperties": false, "properties": Map::new() })
}
