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

/// Only what is written contradicts a small cache.
#[test]
fn a_chunk_size_that_is_not_written_fits_the_cache() {
    let place = Place::new();
    place.edit_recipe("chunk_size = 8\n", "");
    for (overrides, expected) in [
        (&["kv_cache.cache_length=512"][..], "h2o, 512 slots, chunks of 256"),
        (&["kv_cache.cache_length=2048"], "h2o, 2048 slots, chunks of 1024"),
        (&["kv_cache.cache_length=1"], "h2o, 1 slots, chunks of 1"),
        (&["kv_cache.policy={ h2o = { grace_period = 30 } }"], "h2o { grace_period = 30 }, 32 slots, chunks of 1"),
        (&["kv_cache.cache_length=[32, 6, 32]", "kv_cache.randomize_chunk_sizes=true"], "chunks of 3"),
        (&["kv_cache.policy=adakv"], "adakv, 32 slots, chunks of 1"),
        (&["kv_cache.policy=adakv", "kv_cache.cache_length=8"], "adakv, 8 slots, chunks of 1"),
        (&["kv_cache.policy=adakv", "kv_cache.cache_length=4096"], "adakv, 4096 slots, chunks of 394"),
    ] {
        let said = place.check(overrides).done();
        assert!(said.out.contains(expected), "{expected}: {}", said.out);
    }
    place.finetune(&["train.max_steps=1"]).done();
    let resolved = String::from_utf8(place.read("run/recipe.resolved.toml")).unwrap();
    assert!(resolved.contains("chunk_size = 16\n"), "{resolved}");
    // A cache that is asked for beside a run's or in place of none.
    let generate =
        ["generate", "model", "--device", "cpu", "--policy", "h2o", "--cache-length", "12", "--prompt-tokens", "1,2,3"];
    let said = place.run(&[&generate[..], &["--max-new-tokens", "20"]].concat()).done();
    for policy in ["kv_cache.policy=h2o", "kv_cache.policy.h2o.grace_period=0"] {
        let set = ["generate", "model", "--device", "cpu", "--set", policy, "--set", "kv_cache.cache_length=12"];
        let same = place.run(&[&set[..], &["--prompt-tokens", "1,2,3", "--max-new-tokens", "20"]].concat()).done();
        assert_eq!(said.out, same.out, "{policy}");
    }
    place.run(&["generate", "run", "--device", "cpu", "--set", "kv_cache.cache_length=8", "--prompt-tokens", "1,2,3"]).done();
    place.run(&["evaluate", "run", "--device", "cpu", "--split", "train", "--cache-length", "8"]).done();
    let other =
        ["evaluate", "run", "--device", "cpu", "--split", "train", "--cache-length", "8", "--set", "kv_cache.chunk_size=9"];
    assert!(place.run(&other).refused(2).contains("`kv_cache.chunk_size` = 9 is too large"));
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
    place.edit_recipe("policy = \"h20\"", "policy = \"pyramidkv\"");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: unknown value `pyramidkv` for `kv_cache.policy`
      --> recipe.toml:11:10
       |
    11 | policy = "pyramidkv"
       |          ^^^^^^^^^^^

    hint: choose `adakv`, `defensivekv`, `dense`, `dropkv`, `expected-attention`, `h2o`, `h2o-orig`, `h2o-vlen`, `keydiff`, `knorm`, `lagkv`, `lastrec`, `learned`, `qh2o`, `qh2o-vlen`, `rkv`, `smart-lastrec`, `snapkv`, `streaming-llm`, `tova` or `triattention`
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
fn the_error_of_quantisation_without_any() {
    assert_snapshot!(refused(&["kv_cache.policy=qh2o", "kv_cache.buffer=plain"]), @r#"
    error: the policy `qh2o` weighs the errors of quantisation, and `kv_cache.buffer = "plain"` makes none

    hint: set `kv_cache.buffer = "int8"` or `"int4"`, or write `policy = "h2o"`
    "#);
    assert_snapshot!(refused(&["kv_cache.policy.adakv={ policy.qh2o = { score_prefill = true }, floor = 0.5 }"]), @r#"
    error: the policy `adakv` weighs the errors of quantisation, and `kv_cache.buffer = "plain"` makes none

    hint: set `kv_cache.buffer = "int8"` or `"int4"`
    "#);
    Place::new().check(&["kv_cache.policy=qh2o", "kv_cache.buffer=int8"]).done();
}

#[test]
fn shares_by_scores_that_are_not_there() {
    let place = Place::new();
    place.edit_recipe("policy = \"h2o\"", "policy.adakv = { policy = \"lastrec\", floor = 0.5 }");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: `adakv` shares out slots by scores, and the policy `lastrec` has none to compare heads by
      --> recipe.toml:11:18
       |
    11 | policy.adakv = { policy = "lastrec", floor = 0.5 }
       |                  ^^^^^^

    hint: choose `snapkv`, `defensivekv`, `dropkv`, `rkv`, `knorm`, `keydiff`, `expected-attention`, `learned`, `triattention`, or a policy of the h2o family with `score_prefill = true`
    "#);
    place.edit_recipe("\"lastrec\"", "\"h2o\"");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: `adakv` shares out slots by scores, and the policy `h2o` has none to compare heads by
      --> recipe.toml:11:18
       |
    11 | policy.adakv = { policy = "h2o", floor = 0.5 }
       |                  ^^^^^^

    hint: choose `snapkv`, `defensivekv`, `dropkv`, `rkv`, `knorm`, `keydiff`, `expected-attention`, `learned`, `triattention`, or a policy of the h2o family with `score_prefill = true`
    "#);
    place.edit_recipe("\"h2o\"", "\"knrom\"");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: unknown value `knrom` for `policy`
      --> recipe.toml:11:27
       |
    11 | policy.adakv = { policy = "knrom", floor = 0.5 }
       |                           ^^^^^^^

    hint: did you mean `knorm`?
    "#);
    place.edit_recipe("\"knrom\", floor = 0.5", "\"knorm\", floor = 1.5");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: `floor` = 1.5 is not a fraction
      --> recipe.toml:11:36
       |
    11 | policy.adakv = { policy = "knorm", floor = 1.5 }
       |                                    ^^^^^

    hint: choose a number from 0 to 1
    "#);
    place.edit_recipe("1.5", "0.5");
    place.check(&[]).done();
}

#[test]
fn a_chunk_larger_than_the_smallest_share() {
    let adakv = "kv_cache.policy.adakv={ policy.snapkv = { window_size = 2 }, floor = 0.25 }";
    assert_snapshot!(refused(&[adakv]), @r"
    error: `kv_cache.chunk_size` = 8 is too large for every layer: with `cache_length` = 32, a smallest share of 8, 0 first and 2 youngest tokens that are never evicted, the largest that works is 6

    hint: set `kv_cache.chunk_size = 6`, or raise `kv_cache.cache_length` or the policy's `floor`
    ");
    Place::new().check(&[adakv, "kv_cache.chunk_size=6"]).done();
}

#[test]
fn an_initial_part_without_an_end() {
    let place = Place::new();
    place.edit_recipe("policy = \"h2o\"", "policy = \"smart-lastrec\"");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `kv_cache.policy.smart-lastrec` lacks `end_initial_regex`
      --> recipe.toml

    hint: add `end_initial_regex = …` to `[kv_cache.policy.smart-lastrec]`
    ");
    place.edit_recipe("policy = \"smart-lastrec\"", "policy.smart-lastrec = { end_initial_regex = '##(' }");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `kv_cache.policy.smart-lastrec.end_initial_regex`: expected a regular expression, found `##(`: unclosed group
      --> recipe.toml:11:46
       |
    11 | policy.smart-lastrec = { end_initial_regex = '##(' }
       |                                              ^^^^^

    hint: correct `kv_cache.policy.smart-lastrec.end_initial_regex`
    ");
    place.edit_recipe("'##('", "'##', max_initial_fraction = 1.0");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `max_initial_fraction` = 1 is not between 0 and 1
      --> recipe.toml:11:52
       |
    11 | policy.smart-lastrec = { end_initial_regex = '##', max_initial_fraction = 1.0 }
       |                                                    ^^^^^^^^^^^^^^^^^^^^

    hint: choose a part of the cache, as 0.1
    ");
    place.edit_recipe("max_initial_fraction = 1.0", "max_initial_fraction = 0.8");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `kv_cache.chunk_size` = 8 is too large for every layer: with `cache_length` = 32, 25 tokens of an initial part, 0 first and 0 youngest tokens that are never evicted, the largest that works is 7

    hint: set `kv_cache.chunk_size = 7`, or raise `kv_cache.cache_length`
    ");
    place.edit_recipe("max_initial_fraction = 0.8", "max_initial_fraction = 0.5");
    place.check(&[]).done();
}

#[test]
fn an_initial_part_without_a_tokenizer() {
    let place = Place::new();
    std::fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    place.check(&[]).done();
    assert_snapshot!(place.check(&["kv_cache.policy.smart-lastrec.end_initial_regex='##'"]).refused(3), @r"
    error: the initial part of a prompt needs a tokenizer, and the model has no `tokenizer.json`

    hint: put `tokenizer.json` into the model directory, or choose a policy that does not look for an initial part
    ");
}

#[test]
fn an_unknown_buffer() {
    let place = Place::new();
    place.edit_recipe("cache_length = 32", "cache_length = 32\nbuffer = \"int9\"");
    assert_snapshot!(place.check(&[]).refused(2), @r#"
    error: unknown value `int9` for `kv_cache.buffer`
      --> recipe.toml:13:10
       |
    13 | buffer = "int9"
       |          ^^^^^^

    hint: did you mean `int8`?
    "#);
}

#[test]
fn neighbours_without_a_middle() {
    let place = Place::new();
    place.edit_recipe("policy = \"h2o\"", "policy.snapkv = { kernel_size = 4 }");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `kernel_size` = 4 has no middle
      --> recipe.toml:11:19
       |
    11 | policy.snapkv = { kernel_size = 4 }
       |                   ^^^^^^^^^^^

    hint: choose an odd number; 1 pools nothing
    ");
    place.edit_recipe("kernel_size = 4", "window_size = 0");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `window_size` = 0 leaves no query to decide
      --> recipe.toml:11:19
       |
    11 | policy.snapkv = { window_size = 0 }
       |                   ^^^^^^^^^^^

    hint: choose at least 1
    ");
}

#[test]
fn counts_of_queries_that_contradict_each_other() {
    let place = Place::new();
    place.edit_recipe("policy = \"h2o\"", "policy.h2o = { score_prefill = true, reference_counts = true }");
    assert_snapshot!(place.check(&[]).refused(2), @r"
    error: `reference_counts` contradicts `score_prefill`: the reference does not score the prefill span
      --> recipe.toml:11:38
       |
    11 | policy.h2o = { score_prefill = true, reference_counts = true }
       |                                      ^^^^^^^^^^^^^^^^

    hint: remove one of them
    ");
}

#[test]
fn a_growing_cache_that_evicts() {
    assert_snapshot!(refused(&["kv_cache.storage=growing"]), @r#"
    error: `kv_cache.storage = "growing"` contradicts the policy `h2o`, which has a fixed number of slots
      --> --set kv_cache.storage=growing

    hint: write `storage = "preallocated"`, or `policy = "dense"`
    "#);
    assert_snapshot!(refused(&["kv_cache.storage=paged"]), @r#"
    error: `kv_cache.storage = "paged"` contradicts the policy `h2o`, which has a fixed number of slots
      --> --set kv_cache.storage=paged

    hint: write `storage = "preallocated"`, or `policy = "dense"`
    "#);
}

#[test]
fn chunks_that_vary_and_can_be_too_long() {
    let grace = "kv_cache.policy.h2o.grace_period=24";
    Place::new().check(&[grace]).done();
    assert_snapshot!(refused(&[grace, "kv_cache.randomize_chunk_sizes=true"]), @r"
    error: `kv_cache.chunk_size` = 8 makes chunks of up to 12 tokens, as their sizes vary; layer 0 with `cache_length` = 32 takes at most 8

    hint: set `kv_cache.chunk_size = 5`, or raise `kv_cache.cache_length`
    ");
    let bent = [grace, "kv_cache.chunking=reference", "kv_cache.cache_length=[32, 43, 33]"];
    assert_snapshot!(refused(&bent), @r"
    error: `kv_cache.chunk_size` = 8 makes chunks of up to 10 tokens, as their sizes vary; layer 0 with `cache_length` = 32 takes at most 8

    hint: set `kv_cache.chunk_size = 5`, or raise `kv_cache.cache_length`
    ");
    let sinks = ["kv_cache.policy.lastrec.init_grace_tokens=31", "kv_cache.chunk_size=1"];
    Place::new().check(&sinks).done();
    assert_snapshot!(refused(&[&sinks[..], &["kv_cache.chunking=reference", "kv_cache.cache_length=[32, 36, 38]"]].concat()), @r#"
    error: `kv_cache.chunk_size` = 1 makes chunks of up to 4 tokens, as their sizes vary; layer 0 with `cache_length` = 32 takes at most 1

    hint: raise `kv_cache.cache_length`, or set `randomize_chunk_sizes = false` and `chunking = "plain"`
    "#);
}

#[test]
fn a_pyramid_is_shown_layer_by_layer() {
    let place = Place::new();
    let pyramid = ["kv_cache.cache_length={ pyramid = { mean = 24, top = 12 } }", "grad.single_tokens_for_targets=true"];
    let said = place.check(&pyramid).done();
    // The width of the table is another row's.
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let row = |name: &str| said.out.lines().find(|line| line.contains(name)).map(words).unwrap_or_default();
    assert_snapshot!(row("KV cache"), @"| KV cache | h2o, slots 24 on average, 12 at the top, chunks of 8 |");
    assert_snapshot!(row("slots by layer"), @"| slots by layer | 36, 24, 12 |");
    assert_snapshot!(row("longest sample"), @"| longest sample | 40 tokens in 40 chunks |");
    assert_snapshot!(said.err.trim(), @r"`grad.single_tokens_for_targets`: the first target of any sequence counts for its whole batch: a sequence is what it is alone in batches of one sequence only");
    assert!(!place.check(&[]).done().out.contains("slots by layer"));
    let varied = ["kv_cache.chunking=reference", "kv_cache.cache_length=[32, 24, 16]", "kv_cache.randomize_chunk_sizes=true"];
    assert_snapshot!(place.check(&varied).done().err.trim(), @r#"
    `kv_cache.chunking = "reference"`: where layers have caches of different length, the borders of chunks follow the longest sequence of a batch
    `kv_cache.randomize_chunk_sizes`: in training only; the chunks below are of `chunk_size`
    "#);
}
