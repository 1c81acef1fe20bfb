//! Session files that were damaged, and other files in their place: none is gone on with.

use std::sync::OnceLock;

use super::case::{Case, hold};
use super::ground::Ground;

const ASK: &[&str] = &["generate", "model", "--session", "d.session", "--prompt-tokens", "7,8", "--max-new-tokens", "2"];

/// A session of the model that every place has.
fn sound() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let ground = Ground::new();
        let ids: Vec<String> = (5..45).map(|id: u32| id.to_string()).collect();
        ground.run(&["generate", "model", "--prompt-tokens", &ids.join(","), "--save-session", "d.session"]).done();
        ground.read("d.session")
    })
}

fn made(name: String, make: impl Fn(&[u8]) -> Vec<u8> + 'static) -> Case {
    Case::new(name, move |ground: &Ground| ground.write("d.session", make(sound()))).run(ASK).says(&["d.session"])
}

/// One bit of a byte so many hundredths from the beginning.
fn flipped(hundredths: usize) -> Case {
    made(format!("a bit at {hundredths} %"), move |bytes| {
        let mut bytes = bytes.to_vec();
        let place = (bytes.len() - 1) * hundredths / 100;
        bytes[place] ^= 1 << (hundredths % 8);
        bytes
    })
}

/// The part of the tensors.
fn tensors(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

#[test]
fn thirty_damages() {
    let flips = [0, 1, 2, 4, 7, 12, 20, 31, 40, 50, 60, 71, 80, 90, 97, 100].map(flipped);
    let cuts =
        [1, 9, 50, 99].map(|part| made(format!("the first {part} %"), move |bytes| bytes[..bytes.len() * part / 100].to_vec()));
    let mixed = [
        made("halves of the tensors swapped".into(), |bytes| {
            let (head, tail) = bytes.split_at(tensors(bytes));
            let (first, second) = tail.split_at(tail.len() / 2);
            [head, second, first].concat()
        }),
        made("tensors of zeros".into(), |bytes| {
            let head = tensors(bytes);
            [&bytes[..head], &vec![0; bytes.len() - head]].concat()
        }),
        made("tensors a byte further".into(), |bytes| {
            let (head, tail) = bytes.split_at(tensors(bytes));
            let (last, rest) = tail.split_last().unwrap();
            [head, &[*last], rest].concat()
        }),
        made("a byte more".into(), |bytes| [bytes, b"x"].concat()),
        made("its own header with another prompt".into(), |bytes| {
            let text = String::from_utf8_lossy(&bytes[..tensors(bytes)]).into_owned();
            assert!(text.contains("\\\"ids\\\":[5,6,7"));
            [text.replacen("\\\"ids\\\":[5,6,7", "\\\"ids\\\":[7,6,5", 1).as_bytes(), &bytes[tensors(bytes)..]].concat()
        }),
    ];
    let foreign = [
        ("nothing", Vec::new()),
        ("zeros", vec![0; 4096]),
        ("a text", b"a text that somebody wrote".to_vec()),
        ("a pickle", b"\x80\x02}q\x00(X\x05\x00\x00\x00modelq\x01".to_vec()),
    ];
    let foreign = foreign.map(|(name, bytes)| made(format!("{name} as a session"), move |_| bytes.clone()));
    let weights = Case::new("a model's weights as a session", |ground: &Ground| {
        ground.write("d.session", ground.read("model/model.safetensors"));
    });
    let cases: Vec<Case> = flips.into_iter().chain(cuts).chain(mixed).chain(foreign).collect();
    assert_eq!(cases.len() + 1, 30);
    hold(cases);
    hold([weights.run(ASK).says(&["d.session", "not written by kvtune"])]);
}

/// As version 1 was: without a hash.
#[test]
fn a_session_of_an_earlier_version_is_read_with_a_note() {
    let ground = Ground::new();
    let (head, tail) = sound().split_at(tensors(sound()));
    let mut header: serde_json::Value = serde_json::from_slice(&head[8..]).unwrap();
    let metadata = header["__metadata__"].as_object_mut().unwrap();
    metadata.remove("kvtune_session_blake3").unwrap();
    let own = metadata["kvtune_session"].as_str().unwrap().replacen("\"format_version\":2", "\"format_version\":1", 1);
    metadata["kvtune_session"] = own.into();
    let mut header = header.to_string();
    header.push_str(&" ".repeat((8 - header.len() % 8) % 8));
    ground.write("d.session", [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), tail].concat());
    let said = ground.run(ASK).done();
    assert!(said.err.contains("whether it is as it was written can't be checked"), "{}", said.err);
    ground.write("d.session", sound());
    let new = ground.run(ASK).done();
    assert_eq!(new.out, said.out);
    assert!(!new.err.contains("can't be checked"), "{}", new.err);
}
