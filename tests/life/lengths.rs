//! What does not fit a cache that evicts nothing is refused before the first step, not when its turn comes.

use std::fs;

use super::workshop::Workshop;

#[test]
fn a_held_out_sample_too_long_for_the_cache_is_refused_at_once() {
    let workshop = Workshop::new(4);
    let ids: Vec<u32> = (0..200).map(|i| 3 + i % 50).collect();
    let sequence = serde_json::json!({ "input_ids": ids, "labels": ids });
    fs::write(workshop.path("validation.jsonl"), format!("{sequence}\n")).unwrap();
    let dense = ["kv_cache.policy=dense", "kv_cache.cache_length=150"];
    let words = workshop.finetune("", "run", &dense).with(2);
    assert!(words.contains("a sequence of 199 tokens does not fit the dense cache"), "{words}");
    assert!(!workshop.path("run").exists(), "nothing is begun");
    let check = ["check", "--recipe", "recipe.toml", "--set", dense[0], "--set", dense[1]];
    let words = workshop.kvtune("", &check).with(2);
    assert!(words.contains("kv_cache.storage = \"growing\""), "{words}");
    workshop.kvtune("", &[&check[..], &["--set", "kv_cache.cache_length=199"]].concat()).with(0);
}
