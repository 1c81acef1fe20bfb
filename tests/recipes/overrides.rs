//! `--set`: what it accepts, and that it wins over the recipe.

use std::path::Path;

use kvtune::recipe::{CacheLength, ModuleSet, OpenKey, ValidationSource, Warmup};

use super::{SMALL, Told, parse, parse_with, with};

#[test]
fn values_are_toml_or_else_strings() {
    let set = [
        "kv_cache.cache_length=[8, 16]",
        "lora.alpha=3",
        "data.train=other file.jsonl",
        "model.dtype=bf16",
        "eval.initial = true",
    ];
    let recipe = parse_with(SMALL, &set).unwrap().recipe;
    assert_eq!(recipe.kv_cache.cache_length, CacheLength::PerLayer(vec![8, 16]));
    assert_eq!((recipe.lora.unwrap().alpha, recipe.eval.initial), (3.0, true));
    assert_eq!(recipe.data.train.paths(), [std::env::current_dir().unwrap().canonicalize().unwrap().join("other file.jsonl")]);
    let recipe = parse_with(SMALL, &["lora.target_modules=[\"q_proj\"]", "data.train='a=b.jsonl'"]).unwrap().recipe;
    assert_eq!(recipe.lora.unwrap().target_modules, ModuleSet::Names(vec!["q_proj".into()]));
    assert_eq!(recipe.data.train.paths(), [std::env::current_dir().unwrap().canonicalize().unwrap().join("a=b.jsonl")]);
}

#[test]
fn an_override_wins_over_the_recipe_and_the_last_over_the_first() {
    let recipe = parse_with(&with("[lora]\nr = 4"), &["lora.r=5", "lora.r=6"]).unwrap().recipe;
    assert_eq!(recipe.lora.unwrap().r, 6);
}

#[test]
fn a_list_needs_no_brackets() {
    for (set, written) in [
        ("lora.target_modules=q_proj,v_proj", "[lora]\ntarget_modules = [\"q_proj\", \"v_proj\"]"),
        ("lora.target=q_proj, v_proj", "[lora]\ntarget_modules = [\"q_proj\", \"v_proj\"]"),
        ("lora.layers_to_transform=0,2", "[lora]\nlayers_to_transform = [0, 2]"),
        ("kv_cache.cache_length=8,16", "[kv_cache]\ncache_length = [8, 16]"),
        ("optimizer.betas=0.8,0.9", "[optimizer]\nbetas = [0.8, 0.9]"),
    ] {
        let recipe = parse_with(SMALL, &[set]).unwrap_or_else(|e| panic!("{set}: {e}")).recipe;
        assert_eq!(recipe, parse(&with(written)).unwrap().recipe, "{set}");
    }
    let error = parse_with(SMALL, &["lora.layers_to_transform=0,two"]).map(drop).unwrap_err();
    assert!(error.to_string().ends_with("--> --set lora.layers_to_transform=0,two"), "{error}");
}

#[test]
fn a_path_begins_at_the_folder_of_the_shell() {
    let here = std::env::current_dir().unwrap().canonicalize().unwrap();
    let recipe = parse_with(SMALL, &["data.train=a,b.jsonl", "data.validation=../v", "output_dir=out"]).unwrap().recipe;
    assert_eq!(recipe.data.train.paths(), [here.join("a,b.jsonl")]);
    assert_eq!(recipe.data.validation, ValidationSource::File(here.parent().unwrap().join("v").into()));
    assert_eq!(recipe.output_dir, Some(here.join("out")));
    // What the recipe says itself begins at its own.
    assert_eq!(recipe.model.path, Path::new("/nowhere/model"));
}

#[test]
fn an_override_wins_over_another_spelling_of_the_same() {
    for (written, set) in [("r = 4", "lora.rank=6"), ("rank = 4", "lora.r=6"), ("lora_r = 4", "lora.rank=6")] {
        let resolved =
            parse_with(&with(&format!("[lora]\n{written}")), &[set]).unwrap_or_else(|e| panic!("{written} {set}: {e}"));
        assert_eq!(resolved.recipe.lora.unwrap().r, 6, "{written} {set}");
    }
    let notes = parse_with(SMALL, &["lora.rank=6"]).unwrap().notes;
    assert_eq!(notes, ["--set lora.rank=6: `lora.rank` is read as `lora.r`"]);
}

#[test]
fn a_key_is_opened_and_decided_by_an_override() {
    for auto in ["auto", "\"auto\""] {
        let grad =
            parse_with(&with("[grad]\nlayers_per_cell = 4"), &[&format!("grad.layers_per_cell={auto}")]).unwrap().recipe.grad;
        assert_eq!((grad.open, grad.layers_per_cell), (vec![OpenKey::LayersPerCell], 1));
    }
    let open = with("[grad]\nlayers_per_cell = \"auto\"\nundo_log = \"auto\"");
    let grad = parse_with(&open, &["grad.layers_per_cell=3", "grad.undo_log_place=auto"]).unwrap().recipe.grad;
    assert_eq!((grad.open, grad.layers_per_cell), (vec![OpenKey::UndoLog, OpenKey::UndoLogPlace], 3));
}

#[test]
fn an_override_displaces_what_excludes_it() {
    let text = with("[optimizer]\nwarmup_ratio = 0.1").replace("[data]", "[data]\nvalidation = \"v\"");
    let recipe = parse_with(&text, &["optimizer.warmup_steps=3", "data.validation_fraction=0.5"]).unwrap().recipe;
    assert_eq!((recipe.optimizer.warmup, recipe.data.validation), (Warmup::Steps(3), ValidationSource::Fraction(0.5)));
    assert!(parse_with(SMALL, &["optimizer.warmup_steps=3", "optimizer.warmup_ratio=0.1"]).is_err());
}

#[test]
fn a_policy_can_be_chosen_with_its_parameters() {
    let written = ["policy = \"dense\"", "policy.h2o = { normalize_scores = true }", "policy.lastrec = {}", "cache_length = 9"];
    for line in written {
        let text = with(&format!("[kv_cache]\n{line}"));
        let recipe = parse_with(&text, &["kv_cache.policy.h2o.grace_period=4"]).unwrap_or_else(|e| panic!("{line}: {e}")).recipe;
        let kept = if line.contains("normalize") { "normalize_scores = true\n" } else { "" };
        let expected = parse(&with(&format!("[kv_cache.policy.h2o]\ngrace_period = 4\n{kept}"))).unwrap().recipe;
        assert_eq!(recipe.kv_cache.policy, expected.kv_cache.policy, "{line}");
        assert_eq!(parse_with(&text, &["kv_cache.policy=lastrec"]).unwrap().recipe.kv_cache.policy.name, "lastrec");
    }
}

#[test]
fn what_is_wrong_with_an_override_is_shown_at_it() {
    let cases = [
        ("lora.r", "the override `lora.r` has no `=`"),
        ("lora..r=3", "has an empty key"),
        ("=3", "has an empty key"),
        ("lora.r=0", "must be at least 1"),
        ("grad.layers_per_cell=automatic", "must be a whole number, 0 or more, or `\"auto\"`, found the string \"automatic\""),
        ("grad.chunks_per_cell_multiplier=auto", "must be a number, found the string \"auto\""),
        ("lora.r=auto", "must be a whole number, 0 or more, found the string \"auto\""),
        ("lora.r=four", "found the string \"four\""),
        ("model.path.x=1", "a part of it is a value"),
        ("train.seed=99999999999999999999", "does not fit in 64 bits"),
        ("lora={ rank = 3 }", ""),
    ];
    for (set, message) in cases {
        match parse_with(SMALL, &[set]).map(|r| r.recipe) {
            Ok(recipe) => assert_eq!((recipe.lora.unwrap().r, message), (3, "")),
            Err(error) => {
                assert!(error.message().contains(message) && !message.is_empty(), "{set}: {error}");
                assert!(error.to_string().ends_with(&format!("\n  --> --set {set}")), "{error}");
                assert!(error.hint().is_some());
            }
        }
    }
}
