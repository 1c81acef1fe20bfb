//! The tables of `docs/reference/recipe.md`, and `recipe.schema.json` beside it, say what the program reads. `WRITE_REFERENCE=1 cargo test --test suite recipes::reference`
//! writes them anew; the text around them stays.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::generated::{reference, schema};

#[test]
fn the_reference_has_every_key_as_the_program_reads_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/recipe.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let mut tables = reference().into_iter();
    let is_table = |block: &str| block.starts_with("| key |");
    let count = page.split("\n\n").filter(|block| is_table(block)).count();
    assert_eq!(count, tables.len(), "the page needs a line `| key |` for each table, below its heading");
    let block = |block: &str| if is_table(block) { tables.next().unwrap() } else { block.to_owned() }.trim_end().to_owned();
    let blocks = page.split("\n\n").map(block);
    let expected = format!("{}\n", blocks.collect::<Vec<_>>().join("\n\n"));
    if std::env::var_os("WRITE_REFERENCE").is_some() {
        std::fs::write(&path, &expected).unwrap();
        return;
    }
    let differs = expected.lines().zip(page.lines()).find(|(expected, found)| expected != found);
    assert!(
        page == expected,
        "{differs:?}: `WRITE_REFERENCE=1 cargo test --test suite recipes::reference` writes docs/reference/recipe.md anew"
    );
}

#[test]
fn the_schema_is_that_of_the_program_and_the_recipes_satisfy_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("docs/reference/recipe.schema.json");
    let expected = format!("{}\n", serde_json::to_string_pretty(&schema()).unwrap());
    if std::env::var_os("WRITE_REFERENCE").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap();
    assert!(found == expected, "`WRITE_REFERENCE=1 cargo test --test suite recipes::reference` writes it anew");
    let mut recipes = Vec::new();
    find_recipes(&root.join("recipes"), &mut recipes);
    assert!(recipes.len() >= 5, "{recipes:?}");
    for recipe in recipes {
        let text = std::fs::read_to_string(&recipe).unwrap();
        let value: Value = toml::from_str(&text).unwrap();
        satisfies(&value, &schema(), "").unwrap_or_else(|error| panic!("{}: {error}", recipe.display()));
    }
    let refused = |text: &str| satisfies(&toml::from_str(text).unwrap(), &schema(), "").unwrap_err();
    assert_eq!(refused("lora.rr = 8"), ".lora.rr: no such key");
    assert!(refused("lora.r = 'x'").starts_with(".lora.r: "));
    assert!(refused("model.dtype = 'f15'").starts_with(".model.dtype: "));
    satisfies(&toml::from_str("lora_r = 8\nmodel.dtype = 'bfloat16'").unwrap(), &schema(), "").unwrap();
}

fn find_recipes(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            find_recipes(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "toml") {
            found.push(path);
        }
    }
}

/// As far as the schema goes: keys, types, words, alternatives.
fn satisfies(value: &Value, schema: &Value, at: &str) -> Result<(), String> {
    let words = schema["enum"].as_array();
    if words.is_some_and(|words| !words.contains(value)) || schema.get("const").is_some_and(|word| word != value) {
        return Err(format!("{at}: not one of the words"));
    }
    if let Some(any) = schema["anyOf"].as_array() {
        return any
            .iter()
            .map(|one| satisfies(value, one, at))
            .find(Result::is_ok)
            .unwrap_or_else(|| Err(format!("{at}: none of any")));
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    };
    let is = |kind: &&str| match *kind {
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        // Infinity is a number of TOML, and none of JSON.
        "number" => value.is_number() || value.is_null(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other}"),
    };
    if !types.is_empty() && !types.iter().any(is) {
        return Err(format!("{at}: {value} is none of {types:?}"));
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        let at = format!("{at}.{key}");
        match (&schema["properties"][key], &schema["additionalProperties"]) {
            (Value::Null, Value::Bool(false)) => return Err(format!("{at}: no such key")),
            (Value::Null, Value::Null) => {}
            (Value::Null, rest) => satisfies(value, rest, &at)?,
            (property, _) => satisfies(value, property, &at)?,
        }
    }
    value.as_array().into_iter().flatten().try_for_each(|item| satisfies(item, &schema["items"], at))
}
