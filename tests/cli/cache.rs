//! Caches, chunks and policies that don't go together.

use insta::assert_snapshot;

use super::place::Place;

fn refused(overrides: &[&str]) -> String {
    Place::new().check(overrides).refused(2)
}

#[test]
fn a_chunk_too_large_names_the_largest_that_works() {
    assert_snapshot!(refused(&["kv_cache.chunk_size=33"]), @r"
    error: `kv_cache.chunk_size` = 33 is too large for every layer: with `cache_length` = 32, 0 first and 0 youngest tokens that are never evicted, the largest that works is 32

    hint: set `kv_cache.chunk_size = 32`, or raise `kv_cache.cache_length`
    ");
    assert_snapshot!(refused(&["kv_cache.policy={ h2o = { grace_period = 30 } }"]), @r"
    error: `kv_cache.chunk_size` = 8 is too large for every layer: with `cache_length` = 32, 0 first and 30 youngest tokens that are never evicted, the largest that works is 2

    hint: set `kv_cache.chunk_size = 2`, or raise `kv_cache.cache_length`
    ");
    assert_snapshot!(refused(&["kv_cache.policy={ lastrec = { init_grace_tokens = 4 } }", "kv_cache.chunk_size=29"]), @r"
    error: `kv_cache.chunk_size` = 29 is too large for every layer: with `cache_length` = 32, 4 first and 0 youngest tokens that are never evicted, the largest that works is 28

    hint: set `kv_cache.chunk_size = 28`, or raise `kv_cache.cache_length`
    ");
    assert_snapshot!(refused(&["kv_cache.cache_length=[32, 6, 32]"]), @r"
    error: `kv_cache.chunk_size` = 8 is too large for layer 1: with `cache_length` = 6, 0 first and 0 youngest tokens that are never evicted, the largest that works is 6

    hint: set `kv_cache.chunk_size = 6`, or raise `kv_cache.cache_length`
    ");
    Place::new().check(&["kv_cache.policy={ h2o = { grace_period = 30 } }", "kv_cache.chunk_size=2"]).done();
}

#[test]
fn a_dense_cache_too_small() {
    assert_snapshot!(refused(&["kv_cache.policy=dense"]), @r#"
    error: a sequence of 40 tokens does not fit the dense cache of layer 0: `kv_cache.cache_length` = 32

    hint: set `kv_cache.storage = "growing"`, or `kv_cache.cache_length = 40`, or a policy that evicts such as "h2o"
    "#);
    Place::new().check(&["kv_cache.policy=dense", "kv_cache.cache_length=40"]).done();
}

#[test]
fn cache_lengths_for_another_number_of_layers() {
    assert_snapshot!(refused(&["kv_cache.cache_length=[32, 32]"]), @r"
    error: `kv_cache.cache_length` lists 2 lengths, the model has 3 layers

    hint: give one number for all layers, or one per layer
    ");
}

#[test]
fn an_unknown_policy() {
    let place = Place::new();
    place.edit_recipe("policy = \"h2o\"", "policy = \"h20\"");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: unknown value `h20` for `kv_cache.policy`
      --> recipe.toml:11:10
       |
    11 | policy = "h20"
       |          ^^^^^

    hint: did you mean `h2o`?
    "#);
    place.edit_recipe("policy = \"h20\"", "policy = \"snapkv\"");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: unknown value `snapkv` for `kv_cache.policy`
      --> recipe.toml:11:10
       |
    11 | policy = "snapkv"
       |          ^^^^^^^^

    hint: choose `dense`, `h2o` or `lastrec`
    "#);
}

#[test]
fn an_unknown_parameter_of_a_policy() {
    let place = Place::new();
    place.edit_recipe("policy = \"h2o\"", "policy.h2o = { grace_perod = 4 }");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: unknown key `grace_perod` in `[kv_cache.policy.h2o]`
      --> recipe.toml:11:16
       |
    11 | policy.h2o = { grace_perod = 4 }
       |                ^^^^^^^^^^^

    hint: did you mean `grace_period`?
    ");
    place.edit_recipe("grace_perod = 4", "grace_period = 32");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `grace_period` = 32 leaves no slot to evict: `cache_length` is 32
      --> recipe.toml:11:16
       |
    11 | policy.h2o = { grace_period = 32 }
       |                ^^^^^^^^^^^^

    hint: choose less than 32
    ");
}

#[test]
fn a_growing_cache_that_evicts() {
    assert_snapshot!(refused(&["kv_cache.storage=growing"]), @r#"
    error: `kv_cache.storage = "growing"` contradicts the policy `h2o`, which has a fixed number of slots
      --> --set kv_cache.storage=growing

    hint: write `storage = "preallocated"`, or `policy = "dense"`
    "#);
}
