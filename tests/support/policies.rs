//! The policies of the registry, each with parameters under which it can be built: whatever runs all of them takes them from here.

use kvtune::cache::policies;

/// Parameters that a policy cannot do without in a small cache, as TOML; most need none.
pub fn needed(policy: &str) -> &'static str {
    match policy {
        "smart-lastrec" => "end_initial_regex = \"###\"\nmax_initial_fraction = 0.4",
        // The smallest budget must hold a chunk.
        "adakv" => "floor = 0.5\npolicy.snapkv = { window_size = 2 }",
        _ => "",
    }
}

/// Every policy of the registry, with the parameters that it needs.
pub fn registered() -> Vec<(&'static str, &'static str)> {
    policies::names().into_iter().map(|name| (name, needed(name))).collect()
}
