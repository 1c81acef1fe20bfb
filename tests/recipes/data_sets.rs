//! `[[data.sets]]`: what is the set's own, what it has of `[data]`, and what is refused.

use std::path::Path;

use kvtune::recipe::{OnTooLong, Recipe, ValidationSource};

use super::{parse, parse_with, refused};

const HEAD: &str = "[model]\npath = \"model\"\n[data]\non_too_long = \"drop\"\nmax_seq_length = 64\nvalidation_fraction = 0.2\n";
const SETS: &str = "[[data.sets]]\npath = [\"talk.v1.jsonl\", \"more.jsonl\"]\nformat = \"chat\"\ntrain_on = \"last\"\nweight = 2\n\
                    [[data.sets]]\npath = \"b.jsonl\"\nname = \"books\"\nformat = \"text\"\nmax_seq_len = 32\nvalidation = \"v.jsonl\"\n";

#[test]
fn the_keys_of_the_table_are_defaults_for_the_sets() {
    let read = parse(&format!("{HEAD}{SETS}")).unwrap();
    assert_eq!(read.notes.len(), 2, "{:?}", read.notes);
    let recipe = read.recipe;
    let [talk, books] = &recipe.data.sets[..] else { panic!("{:?}", recipe.data.sets) };
    assert_eq!((&talk.name[..], talk.weight, &books.name[..], books.weight), ("talk", 2.0, "books", 1.0));
    assert_eq!((talk.data.format.as_deref(), books.data.format.as_deref()), (Some("messages"), Some("text")));
    assert_eq!((talk.data.max_seq_length, books.data.max_seq_length), (Some(64), Some(32)));
    assert_eq!((talk.data.on_too_long, books.data.on_too_long), (OnTooLong::Drop, OnTooLong::Drop));
    assert_eq!(talk.data.validation, ValidationSource::Fraction(0.2));
    assert_eq!(books.data.validation, ValidationSource::File(Path::new("/nowhere/v.jsonl").into()));
    assert_eq!(talk.data.train.paths(), ["/nowhere/talk.v1.jsonl", "/nowhere/more.jsonl"].map(std::path::PathBuf::from));
    assert_eq!(recipe.data.train.paths().len(), 3);
    // Written and read again, it is the same; and a set has a place of its own in it.
    assert_eq!(parse(&recipe.to_toml()).unwrap().recipe, recipe, "{}", recipe.to_toml());
    let heavier = parse_with(&recipe.to_toml(), &["data.sets.books.weight=0.5"]).unwrap().recipe;
    assert_eq!(heavier.differences(&recipe)[0].key, "data.sets.books.weight");
    assert_eq!(recipe.changes_refused_on_resume(&heavier).len(), 1);
    let moved = parse_with(&recipe.to_toml(), &["data.sets.books.path=/x/b.jsonl"]).unwrap().recipe;
    assert!(recipe.changes_refused_on_resume(&moved).is_empty());
    assert!(recipe.changes_since(&recipe.fixed_settings(), Path::new("/nowhere/a.toml")).unwrap().is_empty());
    // A run of an earlier version knows no sets.
    let plain: Recipe = parse("model.path = 'm'\n[data]\ntrain = 't'\n").unwrap().recipe;
    assert!(plain.data.sets.is_empty() && !plain.to_toml().contains("sets"));
    assert!(parse_with(&format!("{HEAD}{SETS}"), &["data.train=x.jsonl"]).unwrap().recipe.data.sets.is_empty());
}

#[test]
fn what_a_set_cannot_be_is_refused_where_it_stands() {
    for (sets, message) in [
        ("train = \"t\"\n[[data.sets]]\npath = \"a\"", "`data.train` and `data.sets` contradict each other"),
        ("validation = \"t\"\n[[data.sets]]\npath = \"a\"", "`data.validation` and `data.sets` contradict each other"),
        ("sets = []", "`data.sets` lists no data set"),
        ("sets = 3", "`data.sets` lists no data set"),
        ("sets = [\"a.jsonl\"]", "a data set lacks `path`"),
        ("[[data.sets]]\nformat = \"text\"", "a data set lacks `path`"),
        ("[[data.sets]]\npath = 3\nname = \"a\"", "`data.train` must be"),
        ("[[data.sets]]\npath = \"a/x.jsonl\"\n[[data.sets]]\npath = \"b/x.jsonl\"", "two data sets are called `x`"),
        ("[[data.sets]]\npath = \"a\"\nname = \"a b\"", "`a b` is no name of a data set"),
        ("[[data.sets]]\npath = \"a\"\nweight = 0", "`data.sets.a.weight` must be more than 0, and at most 1000, found 0"),
        ("[[data.sets]]\npath = \"a\"\nweight = \"much\"", "`data.sets.a.weight` must be"),
        ("[[data.sets]]\npath = \"a\"\nwieght = 2", "unknown key `wieght`"),
        ("[[data.sets]]\npath = \"a\"\norder = \"shuffled\"", "unknown key `order`"),
        ("[[data.sets]]\npath = \"a\"\nformat = \"txt\"", "unknown value `txt` for `data.format`"),
        ("[[data.sets]]\npath = \"a\"\nvalidation = \"v\"\nvalidation_fraction = 0.1", "contradict each other"),
        ("[[data.sets]]\npath = \"a\"\nformat = \"tokens\"\ntrain_on = \"all\"", "`data.train_on` says nothing"),
    ] {
        let error = refused(&format!("[model]\npath = \"m\"\n[data]\n{sets}\n")).to_string();
        assert!(error.contains(message), "{sets}: {error}");
    }
}
