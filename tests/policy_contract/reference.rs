//! The table `docs/reference/policies.md` beside the code: every policy, every parameter, every default.

use std::collections::{BTreeMap, BTreeSet};

use kvtune::cache;
use kvtune::cache::policies::REGISTRY;
use kvtune::recipe::PolicyRecipe;

const REFERENCE: &str = include_str!("../../docs/reference/policies.md");
/// Slots for which the defaults are compared.
const CAPACITY: usize = 64;

/// The cells of all sequences whose first cell is a name.
fn sequences() -> Vec<Vec<&'static str>> {
    let cells = |line: &'static str| line.trim_matches('|').split('|').map(str::trim).collect();
    REFERENCE.lines().filter(|line| line.starts_with("| `")).map(cells).collect()
}

/// What stands in backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// By policy, the documented parameters with their defaults as written.
fn documented() -> BTreeMap<&'static str, BTreeMap<&'static str, &'static str>> {
    let mut all: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for sequence in sequences() {
        let [policies, parameter, default, _] = sequence[..] else { continue };
        for policy in quoted(policies) {
            let double = all.entry(policy).or_default().insert(quoted(parameter)[0], default);
            assert!(double.is_none(), "`{policy}`: {parameter} twice");
        }
    }
    all
}

fn built(policy: &str, params: &str) -> String {
    // It has no default.
    let needed = if policy == "smart-lastrec" { "end_initial_regex = 'x'\n" } else { "" };
    let recipe = PolicyRecipe::with_params(policy, toml::from_str(&format!("{needed}{params}")).unwrap());
    format!("{:?}", cache::build(&recipe, CAPACITY).unwrap_or_else(|e| panic!("`{policy}` with `{params}`: {e}")))
}

#[test]
fn every_policy_has_one_row() {
    let policies: Vec<&str> =
        sequences().into_iter().filter(|sequence| sequence.len() == 5).map(|sequence| sequence[0].trim_matches('`')).collect();
    let mut sorted = policies.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, cache::policies::names());
    for sequence in sequences().iter().filter(|sequence| sequence.len() == 5) {
        let entry = REGISTRY.iter().find(|entry| entry.name == sequence[0].trim_matches('`')).unwrap();
        assert!(
            sequence[1].starts_with(entry.keeps),
            "`{}` keeps {} in the registry, {} here",
            entry.name,
            entry.keeps,
            sequence[1]
        );
        assert!([1, 2, 4].iter().all(|&cell| !sequence[cell].is_empty()), "{sequence:?}");
    }
}

#[test]
fn every_parameter_is_documented_and_no_other() {
    let documented = documented();
    assert!(documented.keys().all(|policy| cache::policies::names().contains(policy)));
    for policy in cache::policies::names() {
        let recipe = PolicyRecipe::with_params(policy, toml::from_str("zzzzzzzzzzzzzzzz = 1").unwrap());
        let hint = cache::build(&recipe, CAPACITY).unwrap_err().hint().unwrap();
        // Another spelling of a key that is there.
        let known: BTreeSet<&str> = quoted(&hint).into_iter().filter(|&key| key != "sink_tokens").collect();
        let found: BTreeSet<&str> = documented.get(policy).into_iter().flat_map(BTreeMap::keys).copied().collect();
        assert_eq!(found, known, "`{policy}`: {hint}");
    }
}

#[test]
fn the_documented_defaults_are_those_of_the_code() {
    let mut compared = 0;
    for (policy, parameters) in documented() {
        for (parameter, default) in parameters {
            // Some follow from the cache's length.
            let [default] = quoted(default)[..] else { continue };
            assert_eq!(built(policy, &format!("{parameter} = {default}")), built(policy, ""), "`{policy}`: `{parameter}`");
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
    assert_eq!(built("lastrec", "init_grace_tokens = 8"), built("lastrec", ""), "an eighth of {CAPACITY}");
    assert_eq!(built("snapkv", "window_size = 8"), built("snapkv", ""), "an eighth of {CAPACITY}");
}
