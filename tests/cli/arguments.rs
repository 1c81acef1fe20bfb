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
    assert!(error.starts_with("error: `--device cuda:99` can't be had: "), "{error}");
    assert!(error.contains("or use `--device cpu`"), "{error}");
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
    error: the model `model` has no recipe that says what it is evaluated on

    hint: name one with `--recipe`, or a run beside it
    ");
    place.run(&["resume"]).misused();
    assert_eq!(place.run(&[]).code, 2);
    assert_snapshot!(place.run(&["finetune-lora", "--recipe", "recipe.toml"]).refused(2), @r"
    error: the run has no output directory

    hint: give `--out DIR`, or `output_dir` at the top of the recipe
    ");
}

#[test]
fn a_verb_that_does_not_exist() {
    assert_snapshot!(Place::new().run(&["finetune"]).misused(), @r"
    error: unrecognized subcommand 'finetune'

      tip: some similar subcommands exist: 'finetune-lora', 'finetune-full'

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
