//! The registry: each format is there once, and rows tell which they have.

use serde_json::{Value, json};

use super::{FORMATS, detect, registered};
use crate::data::fixtures::Fixture;
use crate::recipe::DataRecipe;

#[test]
fn each_format_is_registered_once_and_known_by_its_fields() {
    for format in FORMATS {
        let name = format.facts.name;
        assert_eq!(FORMATS.iter().filter(|other| other.facts.name == name).count(), 1, "`{name}`");
        assert!(!format.known_by.is_empty());
        for fields in format.known_by {
            assert!(fields.iter().all(|field| format.facts.fields().any(|known| known == *field)), "{fields:?}");
            assert_eq!(detected(fields), name, "{fields:?}");
        }
    }
}

#[test]
fn of_two_formats_whose_fields_a_row_has_one_counts() {
    for (first, other) in [
        ("longbench-v2", "tokens"),
        ("tokens", "prompt-completion"),
        ("tokens", "messages"),
        ("prompt-completion", "messages"),
        ("messages", "text"),
        ("ruler", "helmet"),
        ("ruler", "text"),
        ("helmet", "text"),
    ] {
        let fields = |name| registered(name).unwrap().known_by[0];
        assert_eq!(detected(&[fields(other), fields(first)].concat()), first, "{other}");
    }
}

fn detected(fields: &[&str]) -> &'static str {
    let row: Value = fields.iter().map(|&field| (field.to_owned(), json!("x"))).collect();
    let fixture = Fixture::new("text", format!("{row}\n"));
    detect(&[fixture.dir.path().join("train.jsonl")], &DataRecipe::default()).unwrap().format
}

#[test]
fn a_format_that_there_is_not_is_refused() {
    let error = Fixture::new("xml", "").error();
    assert_eq!(error, "there is no `data.format = \"xml\"`");
}
