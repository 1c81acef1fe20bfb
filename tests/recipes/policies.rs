//! A policy by name, whose parameters a file outside this room reads: its errors point into the recipe all the same.

use kvtune::recipe::{InitialPart, PolicyRecipe, WrittenRegex};
use serde::Deserialize;

use super::{Told, parse, parse_with, with};

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Params {
    #[serde(default)]
    grace_period: usize,
    #[serde(default = "half")]
    keep: f64,
}

fn half() -> f64 {
    0.5
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Needs {
    width: usize,
}

fn policy(lines: &str) -> PolicyRecipe {
    parse(&with(&format!("[kv_cache]\n{lines}"))).expect("a recipe that loads").recipe.kv_cache.policy
}

#[test]
fn parameters_come_from_every_way_to_write_them() {
    let written = [
        "policy = { h2o = { grace_period = 64 } }",
        "policy.h2o = { grace_period = 64 }",
        "policy.h2o.grace_period = 64",
        "[kv_cache.policy.h2o]\ngrace_period = 64",
    ];
    for lines in written {
        let policy = policy(lines);
        assert_eq!(policy.name, "h2o");
        assert_eq!(policy.params::<Params>().unwrap(), Params { grace_period: 64, keep: 0.5 }, "{lines}");
    }
    let in_their_order = parse(&with("[kv_cache]\npolicy.h2o = [64, 0.5]")).map(|r| r.recipe);
    assert!(in_their_order.is_err());
    for lines in ["policy = \"h2o\"", "policy.h2o = {}"] {
        assert_eq!(policy(lines).params::<Params>().unwrap(), Params { grace_period: 0, keep: 0.5 }, "{lines}");
    }
    assert_eq!(policy(""), PolicyRecipe::by_default());
    assert_ne!(policy(""), policy("policy = \"h2o\""), "a name has the parameters that the policy has by itself");
}

#[test]
fn parameters_that_do_not_exist_or_fit_are_shown_where_they_stand() {
    let error = policy("policy.h2o = { grace_perod = 64 }").params::<Params>().unwrap_err();
    assert_eq!(error.message(), "unknown key `grace_perod` in `[kv_cache.policy.h2o]`");
    assert_eq!((error.line(), error.column()), (Some(7), Some(16)));
    assert_eq!(error.hint().unwrap(), "did you mean `grace_period`?");
    let error = policy("policy.h2o = { grace_period = \"a\" }").params::<Params>().unwrap_err();
    assert_eq!(error.message(), "`kv_cache.policy.h2o.grace_period` must be a whole number, 0 or more, found the string \"a\"");
    let error = policy("policy.h2o = { chunk_size = 4 }").params::<Params>().unwrap_err();
    assert_eq!(error.hint().unwrap(), "`chunk_size` belongs in `[kv_cache]`");
    let error = policy("policy = \"h2o\"").params::<Needs>().map(|needs| needs.width).unwrap_err();
    assert_eq!(error.message(), "`kv_cache.policy.h2o` lacks `width`");
    let text = with("[kv_cache]\npolicy = \"h2o\"");
    let set = parse_with(&text, &["kv_cache.policy.h2o.graceperiod=3"]).unwrap().recipe.kv_cache.policy;
    let error = set.params::<Params>().unwrap_err();
    assert!(error.to_string().ends_with("\n  --> --set kv_cache.policy.h2o.graceperiod=3"), "{error}");
}

#[test]
fn an_unknown_name_and_a_refused_parameter_are_shown_where_they_stand() {
    let known = ["dense", "h2o", "lastrec"];
    for (lines, column) in [("policy = \"h20\"", 10), ("policy.h20 = {}", 8), ("policy = { h20 = {} }", 12)] {
        let error = policy(lines).unknown(&known);
        assert_eq!(error.message(), "unknown value `h20` for `kv_cache.policy`");
        assert_eq!((error.line(), error.column()), (Some(7), Some(column)), "{error}");
        assert_eq!(error.hint().unwrap(), "did you mean `h2o`?");
    }
    let error = policy("policy.h2o = { grace_period = 64 }").reject(Some("grace_period"), "too long".into(), "shorten it".into());
    assert_eq!((error.line(), error.column(), error.hint().as_deref()), (Some(7), Some(16), Some("shorten it")));
    let error = policy("policy = \"h2o\"").reject(Some("grace_period"), "too long".into(), "shorten it".into());
    assert_eq!((error.line(), error.column()), (Some(7), Some(10)));
}

#[test]
fn a_policy_made_by_a_program_has_no_place() {
    let table: toml::Table = "grace_period = 3".parse().unwrap();
    let policy = PolicyRecipe::with_params("h2o", table);
    assert_eq!(policy.params::<Params>().unwrap().grace_period, 3);
    assert_eq!(PolicyRecipe::named("h20").unknown(&["h2o"]).to_string(), "unknown value `h20` for `kv_cache.policy`");
    assert_eq!(policy, self::policy("policy.h2o.grace_period = 3"));
}

#[test]
fn the_initial_part_of_prompts_has_defaults_and_a_regular_expression_that_is_one() {
    let read = |lines: &str| kvtune::cache::initial_part(&policy(lines)).map(Option::unwrap);
    let end_regex = WrittenRegex::new("<text>").unwrap();
    let expected = InitialPart { end_regex, include_end_string: true, pad_id: 0, range_is_prefix: true };
    assert_eq!(read("policy.smart-lastrec = { end_initial_regex = '<text>' }").unwrap(), expected);
    let all = "end_initial_regex = '<text>', include_end_string = false, pad_id = 3, range_is_prefix = false";
    let expected = InitialPart { include_end_string: false, pad_id: 3, range_is_prefix: false, ..expected };
    assert_eq!(read(&format!("policy.smart-lastrec = {{ {all} }}")).unwrap(), expected);
    for (written, marked, message) in [
        ("end_initial_regex = '###('", "'###('", "a regular expression, found `###(`: unclosed group"),
        ("end_initial_regex = 3", "3", "`kv_cache.policy.smart-lastrec.end_initial_regex` must be a regular expression"),
        ("end_initial_regexp = 'a'", "end_initial_regexp", "unknown key `end_initial_regexp`"),
        ("pad_id = 3", "{ pad_id = 3 }", "lacks `end_initial_regex`"),
        ("end_initial_regex = 'a', max_initial_fraction = nan", "max_initial_fraction", "`max_initial_fraction` = NaN"),
        ("end_initial_regex = 'a', max_initial_fraction = 1.0", "max_initial_fraction", "`max_initial_fraction` = 1 is not"),
    ] {
        let lines = format!("policy.smart-lastrec = {{ {written} }}");
        let error = read(&lines).unwrap_err();
        assert!(error.message().contains(message), "{error}");
        assert!(lines[error.column().unwrap() - 1..].starts_with(marked) && error.line() == Some(7), "{error}");
        assert!(error.hint().is_some());
    }
}
