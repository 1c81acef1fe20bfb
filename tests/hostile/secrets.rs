//! Keys and tokens of the environment or of a recipe: nothing that is printed or left has them.

use std::fs;
use std::path::Path;

use super::ground::Ground;
use crate::cli::place::Said;

/// What programs around a run are given; none is of use to it.
const VARIABLES: [&str; 8] = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "GITHUB_TOKEN",
    "KVTUNE_UNHEARD_PASSWORD",
];
const SECRET: &str = "hf_TopSecretThatNobodyMaySee";

/// A command with a secret in every variable.
fn run(ground: &Ground, arguments: &[&str]) -> Said {
    let mut command = ground.command(arguments);
    command.envs(VARIABLES.map(|name| (name, format!("{SECRET}-{name}"))));
    let said = ground.hear(&command);
    let all = format!("{}{}", said.out, said.err);
    assert!(!all.contains(SECRET), "{arguments:?}: {all}");
    said
}

/// Files below a directory that have the secret.
fn with_secret(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(with_secret(&path));
        } else if fs::read(&path).unwrap().windows(SECRET.len()).any(|part| part == SECRET.as_bytes()) {
            found.push(path.display().to_string());
        }
    }
    found
}

#[test]
fn nothing_of_the_environment_is_printed_or_kept() {
    let ground = Ground::new();
    // A comment is not kept either.
    ground.write("recipe.toml", format!("# token: {SECRET}\n{}", ground.text("recipe.toml")));
    run(&ground, &["check", "--recipe", "recipe.toml"]).done();
    run(&ground, &["finetune-lora", "--recipe", "recipe.toml", "--out", "run"]).done();
    run(&ground, &["resume", "run"]).done();
    run(&ground, &["inspect", "run"]).done();
    run(&ground, &["report", "run"]).done();
    run(&ground, &["export", "run", "--for", "merged", "--out", "merged"]).done();
    run(&ground, &["evaluate", "run", "--split", "train"]).done();
    run(&ground, &["doctor"]);
    ground.remove("model/config.json");
    run(&ground, &["check", "--recipe", "recipe.toml"]).refused(3);
    ground.remove("recipe.toml");
    assert_eq!(with_secret(&ground.path("")), [""; 0]);
}

/// A key of another program that has no place here: the line is told, and not what it says.
#[test]
fn a_key_in_a_recipe_is_not_shown() {
    for line in [
        "hub_token = \"SECRET\"",
        "[wandb]\napi_key = \"SECRET\"",
        "[aws]\nsecret_access_key = 'SECRET'",
        "password = \"SECRET\"",
        "wandb = { api_key = \"SECRET\" }",
    ] {
        let ground = Ground::new();
        ground.write("recipe.toml", format!("{}\n{}", line.replace("SECRET", SECRET), ground.text("recipe.toml")));
        let error = run(&ground, &["finetune-lora", "--recipe", "recipe.toml", "--out", "run"]).refused(2);
        assert!(error.contains("recipe.toml:"), "{error}");
        assert!(!ground.path("run").exists());
    }
    let ground = Ground::new();
    let set = format!("train.hub_token={SECRET}");
    run(&ground, &["check", "--recipe", "recipe.toml", "--set", &set]).refused(2);
}
