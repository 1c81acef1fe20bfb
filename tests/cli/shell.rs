//! What shells and `man` know of the commands.

use super::place::Place;

#[test]
fn every_shell_completes_every_verb() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let said = place.run(&["completions", shell]).done();
        for verb in ["finetune-lora", "train", "init", "check", "completions"] {
            assert!(said.out.contains(verb), "{shell}: {verb}");
        }
        assert_eq!(said.err, "", "{shell}");
    }
    place.run(&["completions", "cmd"]).misused();
}

#[test]
fn every_verb_has_a_page_of_its_own() {
    let place = Place::new();
    place.run(&["man", "share/man1"]).done();
    let names = place.names("share/man1");
    assert_eq!((names.len(), names.contains(&"kvtune.1".to_owned())), (23, true), "{names:?}");
    let page = String::from_utf8(place.read("share/man1/kvtune-check.1")).unwrap();
    assert!(page.contains(".TH kvtune-check 1") && page.contains("Examples:") && page.contains("kvtune check my.toml"), "{page}");
}
