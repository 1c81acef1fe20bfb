//! Arguments that are missing, contradict each other, or ask for what this machine hasn't.

use insta::assert_snapshot;

use super::place::Place;

#[test]
fn devices() {
    let place = Place::new();
    assert_snapshot!(place.run(&["verify", "--recipe", "recipe.toml", "--device", "gpu"]).misused(), @r"
    error: invalid value 'gpu' for '--device <DEVICE>': expected `auto`, `cpu`, `cuda` or `cuda:1`

    For more information, try '--help'.
    ");
    // No machine has a hundred; why not is the machine's to say.
    let error = place.run(&["verify", "--recipe", "recipe.toml", "--device", "cuda:99"]).refused(2);
    assert!(error.starts_with("error: `--device cuda:99` is not available: "), "{error}");
    assert!(error.contains("use `--device cpu`"), "{error}");
}

#[test]
fn counts_of_nothing() {
    let place = Place::new();
    assert_snapshot!(place.run(&["verify", "--recipe", "recipe.toml", "--samples", "0"]).misused(), @r"
    error: invalid value '0' for '--samples <K>': 0 is not in 1..=16777216

    For more information, try '--help'.
    ");
    assert_snapshot!(place.run(&["check", "--recipe", "recipe.toml", "--threads", "0"]).misused(), @r"
    error: invalid value '0' for '--threads <N>': 0 is not in 1..=65535

    For more information, try '--help'.
    ");
}

#[test]
fn arguments_that_are_missing() {
    let place = Place::new();
    place.run(&["check"]).misused();
    place.run(&["evaluate"]).misused();
    assert_snapshot!(place.run(&["evaluate", "--base", "model"]).refused(2), @r"
    error: the model `model` has no recipe that names data

    hint: name one with `--recipe`, or a run beside it
    ");
    place.run(&["resume"]).misused();
    assert_eq!(place.run(&[]).code, 2);
    assert_snapshot!(place.run(&["finetune-lora", "--recipe", "recipe.toml", "--resume-if-possible"]).refused(2), @r"
    error: `--resume-if-possible` needs the directory of the run, and the default is another at each start

    hint: give `--out DIR`, or `output_dir` at the top of the recipe
    ");
}

#[test]
fn a_recipe_is_named_by_its_place_or_by_a_flag_and_once() {
    let place = Place::new();
    for verb in ["finetune-lora", "train", "finetune-full", "check", "plan", "verify", "bench", "data"] {
        let both = place.run(&[verb, "recipe.toml", "--recipe", "recipe.toml"]).misused();
        assert!(both.contains("'[RECIPE]' cannot be used with '--recipe <FILE>'"), "{verb}: {both}");
        let none = place.run(&[verb]).misused();
        assert!(none.contains("not provided:\n") && none.contains("  <RECIPE|--recipe <FILE>"), "{verb}: {none}");
    }
    let by_place = place.run(&["check", "recipe.toml", "--device", "cpu"]).done();
    assert_eq!(by_place.out.lines().count(), place.check(&[]).done().out.lines().count());
    assert_eq!(place.run(&["data", "--recipe", "recipe.toml"]).done().out, place.run(&["data", "recipe.toml"]).done().out);
    let misused = place.run(&["verify", "recipe.toml", "--conformance", "model"]).misused();
    assert!(misused.contains("'[RECIPE]' cannot be used with '--conformance <DIR>'"), "{misused}");
}

/// Clap waives `requires` where the required argument contradicts one that is given.
#[test]
fn what_belongs_to_another_argument_is_refused_without_it() {
    let place = Place::new();
    for arguments in [
        &["generate", "model", "--prompt", "a", "--system-prompt", "x"][..],
        &["generate", "model", "--messages", "m.json", "--system-prompt", "x"],
        &["inspect", "run", "--out", "x.svg"],
        &["inspect", "run", "--sequence", "3"],
        &["verify", "recipe.toml", "--base", "model"],
        &["verify", "--recipe", "recipe.toml", "--base", "model"],
    ] {
        let misused = place.run(arguments).misused();
        assert!(misused.contains("cannot be used with"), "{arguments:?}: {misused}");
    }
}

#[test]
fn a_run_that_nobody_names_a_directory_for_has_one_of_its_own() {
    let place = Place::new();
    let said = place.run(&["train", "recipe.toml", "--device", "cpu", "--set", "train.max_steps=1"]).done();
    let runs = place.names("runs");
    let [run] = &runs[..] else { panic!("{runs:?}") };
    let date = run.strip_prefix("recipe-").expect("the recipe's name");
    let is_date = |(at, sign): (usize, char)| if at == 8 { sign == '-' } else { sign.is_ascii_digit() };
    assert!(date.len() == 15 && date.chars().enumerate().all(is_date), "{run}");
    assert!(said.err.contains(&format!("the run is written to `runs/{run}`: neither `--out` nor")), "{}", said.err);
    assert!(place.names(&format!("runs/{run}")).contains(&"final".to_owned()));
}

#[test]
fn a_verb_that_does_not_exist() {
    assert_snapshot!(Place::new().run(&["finetune"]).misused(), @r"
    error: unrecognized subcommand 'finetune'

      tip: some similar subcommands exist: 'init', 'finetune-lora', 'finetune-full'

    Usage: kvtune [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
}

#[test]
fn nothing_held_out_for_validation() {
    let place = Place::new();
    let said = place.run(&["evaluate", "--base", "model", "--recipe", "recipe.toml", "--device", "cpu"]);
    assert_snapshot!(said.refused(2), @r"
    error: the recipe holds no samples out for validation

    hint: use `--split train`, or `--set data.validation_fraction=0.1`
    ");
}

#[test]
fn more_threads_than_help() {
    let said = Place::new().run(&["check", "--recipe", "recipe.toml", "--threads", "65535"]).refused(2);
    assert!(said.contains("`--threads` asks for 65535 threads, expected at most") && said.contains("hint: "), "{said}");
}

#[test]
fn an_empty_argument_has_a_hint() {
    let said = Place::new().run(&["finetune-lora", "--recipe", "recipe.toml", "--out", ""]).misused();
    assert!(said.contains("an empty text names nothing"), "{said}");
}
