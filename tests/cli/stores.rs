//! Stores that round or are files, in the words of `check` and `verify`.

use insta::assert_snapshot;

use super::place::{Place, Said};

fn verify(place: &Place, set: &[&str]) -> Said {
    let mut arguments = vec!["verify", "--device", "cpu", "--threads", "1", "--recipe", "recipe.toml"];
    arguments.extend(set.iter().flat_map(|set| ["--set", *set]));
    place.run(&arguments)
}

#[test]
fn check_says_what_is_not_exact() {
    let place = Place::new();
    let said = place.check(&["grad.layer_checkpoints=int8", "grad.undo_log=int4"]).done();
    assert!(
        said.err
            .contains("`grad.layer_checkpoints = \"int8\"`: the gradient is not exact (cosine to the exact one at least 0.9999")
    );
    assert!(said.err.contains("`grad.undo_log = \"int4\"`: the gradient is not exact (cosine to the exact one at least 0.995"));
    assert!(said.out.contains("int8, memory") && said.out.contains("int4, memory"), "{}", said.out);
    // Plain stores are exact wherever they are, and what is never used rounds nothing.
    let said = place.check(&["grad.layer_checkpoints_place=file", "grad.undo_log_place=file"]).done();
    assert!(!said.err.contains("not exact") && said.out.contains("plain, file"), "{} {}", said.err, said.out);
    let said = place.check(&["grad.layer_checkpoints=int8", "grad.layers_per_cell=3"]).done();
    assert!(!said.err.contains("not exact"), "{}", said.err);
}

#[test]
fn check_says_that_the_last_retreat_rounds() {
    let place = Place::new();
    assert_snapshot!(place.check(&["grad.on_out_of_memory=retreat"]).done().err.trim(), @r#"`grad.on_out_of_memory = "retreat"`: if a step fits no other way, it and all that follow are made with layer checkpoints in int8; then the gradient is not exact (cosine to the exact one at least 0.9999 and relative error at most 0.5 % on the models of the tests)"#);
    let none: &[&[&str]] =
        &[&[], &["grad.on_out_of_memory=fail"], &["grad.on_out_of_memory=retreat", "grad.layer_checkpoints=int8"]];
    for set in none {
        let said = place.check(set).done();
        assert!(!said.err.contains("on_out_of_memory"), "{set:?}: {}", said.err);
    }
}

#[test]
fn verify_says_how_near_the_gradient_comes() {
    let place = Place::new();
    let said = verify(&place, &["grad.layer_checkpoints=int8"]).done();
    let words = "`grad.layer_checkpoints = \"int8\"`: cosine of the whole gradient 0.9999";
    assert!(
        said.out.contains(words)
            && said.out.contains("(at least 0.9999), relative error 0.")
            && said.out.contains("0.5 %, as the models of the tests have it"),
        "{}",
        said.out
    );
    assert!(said.out.contains("verify with `--set grad.layer_checkpoints=plain`"), "{}", said.out);
    let said = verify(&place, &["grad.layer_checkpoints=int8", "grad.undo_log=int4"]).done();
    assert!(said.out.contains("`grad.layer_checkpoints = \"int8\"`, `grad.undo_log = \"int4\"`: cosine"), "{}", said.out);
    assert!(said.out.contains("(at least 0.995)") && said.out.contains("(at most 10.0 %, as"), "{}", said.out);
    assert!(said.out.contains("`--set grad.layer_checkpoints=plain --set grad.undo_log=plain`"), "{}", said.out);
    // This model is more sensitive than others: 4 bits are too few for it.
    let error = verify(&place, &["grad.layer_checkpoints=int4"]).refused(1);
    assert!(error.contains("the gradient has the cosine 0.99") && error.contains("expected at least 0.995"), "{error}");
    let said = verify(&place, &["grad.layer_checkpoints=int4", "grad.layers_per_cell=3"]).done();
    assert!(said.out.contains("worst relative error"), "{}", said.out);
}

#[test]
fn files_that_have_no_place_are_temporary() {
    let place = Place::new();
    std::fs::create_dir(place.path("temporary")).unwrap();
    let hear = |arguments: &[&str]| place.hear(place.command(arguments).env("TMPDIR", place.path("temporary")));
    let both = ["--set", "grad.layer_checkpoints_place=file", "--set", "grad.undo_log_place=file"];
    let verify = ["verify", "--device", "cpu", "--threads", "1", "--recipe", "recipe.toml"];
    let bench = ["bench", "--device", "cpu", "--recipe", "recipe.toml", "--tokens", "200", "--steps", "1"];
    assert!(hear(&[&verify[..], &both].concat()).done().out.contains("proved"));
    hear(&[&bench[..], &both].concat()).done();
    assert_eq!(place.names("temporary"), [""; 0]);
    // The recipe's own places come before.
    place.write("nowhere", "");
    for place_of in ["grad.scratch_dir=fast", "output_dir=run"] {
        let mut command = place.command(&[&verify[..], &both, &["--set", place_of]].concat());
        let said = place.hear(command.env("TMPDIR", place.path("nowhere"))).done();
        assert!(said.out.contains("proved"), "{}", said.out);
    }
    assert!(!place.path("fast").exists() && !place.path("run").exists());
    let mut command = place.command(&[&verify[..], &both].concat());
    let error = place.hear(command.env("TMPDIR", place.path("nowhere"))).refused(1);
    assert!(error.contains("cannot create a scratch file in `<dir>/nowhere`"), "{error}");
    place.write("file", "in the way");
    // Where nothing is a file, nothing is in the way.
    place.check(&["grad.scratch_dir=file"]).done();
    let check = |dir: &str| place.check(&[&format!("grad.scratch_dir={dir}"), "grad.undo_log_place=file"]);
    assert!(check("file").refused(1).starts_with("error: cannot create a scratch file in `<dir>/file`"));
    check("fast/and/wide").done();
    assert!(!place.path("fast").exists());
    let said = self::verify(&place, &["grad.layer_checkpoints_place=file", "grad.scratch_dir=file"]);
    assert_snapshot!(said.refused(1), @r"
    error: cannot create a scratch file in `<dir>/file`
    cause: Not a directory (os error 20)

    hint: something else stands there: check whether a file or a directory is meant
    ");
}
