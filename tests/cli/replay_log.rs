//! The replay log of a proof: written, followed by another proof, and refused where it does not belong.

use insta::assert_snapshot;

use super::place::{Place, Said};

/// `kvtune verify` on two samples, with further arguments.
fn verify(place: &Place, arguments: &[&str]) -> Said {
    let common = ["verify", "--device", "cpu", "--threads", "1", "--recipe", "recipe.toml"];
    place.run(&[&common[..], arguments].concat())
}

const LOG: &str = "first/replay_log.safetensors";

fn dumped() -> Place {
    let place = Place::new();
    verify(&place, &["--samples", "2", "--dump", "first"]).done();
    place
}

#[test]
fn a_proof_that_follows_a_log_is_the_same_to_the_bit() {
    let place = dumped();
    let said = verify(&place, &["--samples", "2", "--replay-log", LOG, "--dump", "second"]).done();
    assert!(said.out.contains("\nproved"), "{}", said.out);
    assert_eq!(place.names("first"), place.names("second"));
    for name in place.names("first") {
        assert!(place.read(&format!("first/{name}")) == place.read(&format!("second/{name}")), "{name}");
    }
}

/// The slots are the last bytes of the file: each other value of one is refused, or followed and proved.
#[test]
fn a_flipped_choice_is_followed_too_or_refused() {
    let place = dumped();
    let clean = place.read(LOG);
    let (mut followed, mut refused) = (0, 0);
    for slot in [2, 9, 17, 60] {
        let mut bytes = clean.clone();
        *bytes.last_mut().unwrap() = if bytes.last() == Some(&slot) { slot + 1 } else { slot };
        place.write("flipped", &bytes);
        let said = verify(&place, &["--samples", "2", "--replay-log", "flipped", "--dump", "flips"]);
        if said.code == 0 {
            assert!(said.out.contains("\nproved"), "{}", said.out);
            assert!(place.read("flips/gradients.safetensors") != place.read("first/gradients.safetensors"));
            followed += 1;
        } else {
            assert!(said.refused(3).contains("expected 8 different slots below 32"));
            refused += 1;
        }
    }
    assert!(followed > 0 && refused > 0, "{followed} followed, {refused} refused");
}

#[test]
fn a_log_that_belongs_elsewhere() {
    let place = dumped();
    assert_snapshot!(verify(&place, &["--samples", "3", "--replay-log", LOG]).refused(3), @r"
    error: the replay log belongs to another model or batch: expected a batch of 3, found a batch of 2

    hint: take the recipe, the data and the number of samples with which the log was written
    ");
    assert_snapshot!(verify(&place, &["--samples", "2", "--replay-log", LOG, "--set", "kv_cache.chunk_size=4"]).refused(3), @r"
    error: the replay log belongs to another model or batch: expected chunk 0 (event 0) of 4 positions from 0, with [4, 4] tokens by sequence, found chunk 0 (event 0) of 8 positions from 0, with [8, 8] tokens by sequence

    hint: take the recipe, the data and the number of samples with which the log was written
    ");
    assert_snapshot!(verify(&place, &["--samples", "2", "--replay-log", LOG, "--set", "kv_cache.cache_length=33"]).refused(3), @r"
    error: the replay log belongs to another model or batch: expected chunk 4 (event 0) of 1 positions from 32, with [1, 1] tokens by sequence, found chunk 4 (event 1) of 8 positions from 32, with [8, 8] tokens by sequence

    hint: take the recipe, the data and the number of samples with which the log was written
    ");
}

#[test]
fn a_file_that_is_no_log() {
    let place = dumped();
    assert_snapshot!(verify(&place, &["--replay-log", "nowhere"]).refused(3), @r"
    error: cannot read `nowhere`
    cause: No such file or directory (os error 2)

    hint: check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory
    ");
    assert_snapshot!(verify(&place, &["--replay-log", "first/gradients.safetensors"]).refused(3), @r"
    error: `first/gradients.safetensors` is not a valid replay log: its metadata does not say `kvtune replay log`, version 1

    hint: write it again with `kvtune verify --dump`; the file is damaged or something else
    ");
    let bytes = place.read(LOG);
    place.write("short", &bytes[..bytes.len() - 1]);
    assert!(verify(&place, &["--replay-log", "short"]).refused(3).contains("truncated"));
}

#[test]
fn its_size_is_told_before_a_run() {
    for (policy, words) in [
        ("h2o", "at most 6 bytes per evicted token (3 layers × 2 KV heads × 1 B), 48 B for the longest sample"),
        ("tova", "at most 3 bytes per evicted token for all KV heads together (3 layers × 1 B), 24 B for"),
        ("lastrec", " 3 bytes per evicted token for all sequences and KV heads together (3 layers × 1 B), 24 B for"),
    ] {
        let said = Place::new().check(&[&format!("kv_cache.policy={policy}")]).done();
        assert!(said.out.contains(words), "{}", said.out);
    }
    let said = Place::new().check(&["kv_cache.policy=dense", "kv_cache.cache_length=40"]).done();
    assert!(said.out.contains("empty: nothing is evicted"), "{}", said.out);
}
