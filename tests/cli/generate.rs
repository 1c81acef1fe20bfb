//! `generate`: what it prints, and what is said where there is nothing to go on from.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::place::{Place, Said};
use crate::binary::kvtune;
use crate::generation::{numbers, rows};
use crate::starter::PATIENCE;

fn generate(place: &Place, more: &[&str]) -> Said {
    place.run(&[&["generate", "model"], more].concat())
}

/// The error holds some words.
fn refused(said: Said, code: i32, words: &str) {
    let error = said.refused(code);
    assert!(error.contains(words), "{words}: {error}");
}

const EVICTS: &[&str] = &["--policy", "h2o", "--cache-length", "16", "--set", "kv_cache.chunk_size=4"];

/// The last line, as JSON.
fn last(said: &str) -> Value {
    serde_json::from_str(said.lines().last().unwrap_or_default()).unwrap()
}

#[test]
fn a_line_of_json_for_each_text() {
    let place = Place::new();
    let row = &rows("greedy.jsonl")[0];
    let prompt: Vec<String> = numbers(&row["prompt"]).iter().map(ToString::to_string).collect();
    let tokens = prompt.join(",");
    let more = ["--prompt-tokens", &tokens, "--policy", "dense", "--max-new-tokens", "24", "--greedy", "--format", "json"];
    let found = last(&generate(&place, &more).done().out);
    assert_eq!((&found["token_ids"], &found["text"]), (&row["new_tokens"], &row["text"]));
    assert_eq!(found["prompt_tokens"], prompt.len());
    assert_eq!(found["finish_reason"], "length");
    let said =
        generate(&place, &["--prompt", "The sea", "--prompt", "Ada", "--n", "2", "--seed", "1", "--format", "json"]).done();
    assert_eq!(said.out.lines().count(), 4);
}

#[test]
fn a_prompt_that_can_not_be_continued_leaves_the_others_their_lines() {
    let place = Place::new();
    let ask = ["--prompt-tokens", "5,6", "--prompt-tokens", "5,600", "--prompt-tokens", "7,8", "--max-new-tokens", "4"];
    let said = generate(&place, &[&ask[..], &["--n", "2", "--format", "json"]].concat());
    let lines: Vec<Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let places: Vec<_> = lines.iter().map(|line| (line["prompt"].as_u64().unwrap(), line["sample"].as_u64().unwrap())).collect();
    assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
    let words = "token 600 of the prompt is not in the vocabulary of 512";
    for line in &lines {
        let failed = line["prompt"] == 1;
        assert_eq!(line["token_ids"].as_array().unwrap().len(), if failed { 0 } else { 4 }, "{line}");
        assert_eq!(line["finish_reason"], if failed { "error" } else { "length" });
        assert_eq!(line.get("error").and_then(Value::as_str), failed.then_some(words));
    }
    refused(said, 3, words);
}

/// A text that ends with its first token leaves nothing running, and the next prompt waits still.
#[test]
fn prompts_behind_a_text_of_one_token_are_continued() {
    let ask =
        ["--prompt-tokens", "5", "--prompt-tokens", "6", "--prompt-tokens", "7", "--max-new-tokens", "1", "--format", "json"];
    assert_eq!(generate(&Place::new(), &ask).done().out.lines().count(), 3);
}

#[test]
fn a_line_comes_as_soon_as_its_text_ends() {
    let place = Place::new();
    let prompts = ["--prompt-tokens", "5", "--prompt-tokens", "6", "--max-new-tokens", "600"];
    let mut command = kvtune();
    command.current_dir(place.path(".")).args(["generate", "model", "--batch", "1", "--greedy", "--ignore-eos"]).args(prompts);
    let mut command = command.args(["--format", "json"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(command.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["prompt"], 0);
    assert!(command.try_wait().unwrap().is_none(), "the second text is still being written");
    command.kill().unwrap();
    command.wait().unwrap();
}

#[test]
fn a_document_that_is_read_once() {
    let place = Place::new();
    let document = ["--prompt", "Read this: the sea is grey and old and wide and deep and far.", "--save-session", "d.session"];
    generate(&place, &[&document, EVICTS].concat()).done();
    let ask = ["--session", "d.session", "--prompt", " Is it?", "--max-new-tokens", "6", "--format", "json"];
    let found = last(&generate(&place, &[&ask, EVICTS].concat()).done().out);
    assert_eq!(found["token_ids"].as_array().unwrap().len(), 6);
    // Several questions to the one that was read: each gets the answer that it gets alone.
    let lines = |said: Said| said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>();
    let both = lines(generate(&place, &[&ask[..], &["--prompt", " Who?"], EVICTS].concat()).done());
    assert_eq!((both.len(), &both[0]["token_ids"]), (2, &found["token_ids"]));
    for buffer in ["kv_cache.buffer=int8", "kv_cache.buffer=int4"] {
        let rounded = [EVICTS, &["--set", buffer]].concat();
        generate(&place, &[&document[..], &rounded].concat()).done();
        let found = last(&generate(&place, &[&ask[..], &rounded].concat()).done().out);
        assert_eq!(found["token_ids"].as_array().unwrap().len(), 6, "{buffer}");
    }
    // A cache of fixed size that nothing leaves is shorter than the model.
    let fixed = ["--policy", "dense", "--cache-length", "96"];
    generate(&place, &[&document, &fixed[..]].concat()).done();
    let found = last(&generate(&place, &[&ask[..], &fixed].concat()).done().out);
    assert_eq!(found["token_ids"].as_array().unwrap().len(), 6);
    generate(&place, &[&document, EVICTS].concat()).done();
    let other = ["--policy", "h2o", "--cache-length", "20", "--set", "kv_cache.chunk_size=4"];
    let said = generate(&place, &[&ask[..], &other].concat());
    refused(said, 3, "was saved with another `kv_cache.cache_length`: expected 20, found 16");
    let said = generate(&place, &[&ask[..], EVICTS, &["--adapter", "adapter"]].concat());
    refused(said, 3, "was saved with another `adapter`");
}

#[test]
fn a_conversation_goes_on_from_what_was_read() {
    let place = Place::new();
    place.write("t.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}<assistant>");
    let talk = ["generate", "model", "--chat", "--chat-template", "t.jinja", "--max-new-tokens", "5", "--greedy"];
    let lines = "Hello\n!status\n!nothing\nAnd then?\n!status\n!clear\n!status\n";
    let said = place.hear_beside(place.command(&talk), lines).done();
    assert_eq!(said.out.lines().count(), 2, "{}", said.out);
    for words in ["2 messages, ", "there is no `!nothing`", "4 messages, ", "0 messages, 0 tokens"] {
        assert!(said.err.contains(words), "{words}: {}", said.err);
    }
    assert!(!said.err.contains("read again"), "{}", said.err);
    let json = [&talk[..], &["--format", "json"]].concat();
    let answers = place.hear_beside(place.command(&json), lines).done().out;
    let answers = answers.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let answers: Vec<String> = answers.map(|line| line["content"].as_str().unwrap().to_owned()).collect();
    assert_eq!(answers, said.out.lines().collect::<Vec<_>>());
    // A message that is refused takes nothing along: `!status` is what it was, and the next message goes on from there.
    let lines = format!("Hello\n!status\n{}\n!status\nAnd then?\n", "again ".repeat(33_000));
    let said = place.hear_beside(place.command(&talk), &lines).done();
    assert!(said.err.contains("are more than the 32768 positions of the model"), "{}", said.err);
    let status: Vec<&str> = said.err.lines().filter(|line| line.starts_with("2 messages, ")).collect();
    assert!(matches!(status[..], [before, after] if before == after), "{}", said.err);
    assert_eq!(said.out.lines().collect::<Vec<_>>(), answers);
    assert!(!said.err.contains("read again"), "{}", said.err);
    // A template that leaves the spaces of earlier messages out writes them otherwise.
    place.write("t.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content[:2] }}<|endoftext|>{% endfor %}<assistant>");
    let said = place.hear_beside(place.command(&talk), "Hello\nAnd then?\n").done();
    assert!(said.err.contains("the conversation is read again from token 0 on"), "{}", said.err);
    // In chunks that are shorter than what stays the same, that is not read again.
    let small = [&talk[..], &["--system-prompt", "Be brief.", "--set", "kv_cache.chunk_size=4"]].concat();
    let said = place.hear_beside(place.command(&small), "Hello\nAnd then?\n").done();
    assert!(said.err.contains("the conversation is read again from token 28 on"), "{}", said.err);
}

#[test]
fn a_chat_that_waits_ends_at_once_when_it_is_asked_to() {
    let place = Place::new();
    let mut chat = place.command(&["generate", "model", "--chat", "--chat-template", "{{ messages }}"]);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    writeln!(chat.stdin.as_mut().unwrap(), "!status").unwrap();
    // It has loaded, and waits for another line.
    let mut told = BufReader::new(chat.stderr.take().unwrap()).lines();
    assert!(told.any(|line| line.unwrap().contains("0 messages")));
    kill_process(Pid::from_child(&chat), Signal::TERM).unwrap();
    let sent = Instant::now();
    while chat.try_wait().unwrap().is_none() {
        assert!(sent.elapsed() < PATIENCE, "it waits for a line");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_conversation_in_a_file_is_a_prompt_of_its_text() {
    let place = Place::new();
    place.write(
        "t.jinja",
        "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}{{ note }}\
         {% if add_generation_prompt %}<assistant>{% endif %}",
    );
    place.write("tools.json", r#"[{"name": "f"}]"#);
    let asked = r#"{"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"note": "N"}}"#;
    place.write("asked.json", asked);
    place.write("begun.json", r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The sea"}], "continue_final_message": true}"#);
    let text = |more: &[&str]| {
        let greedy = ["--max-new-tokens", "6", "--greedy", "--format", "json", "--policy", "dense"];
        let found = last(&generate(&place, &[more, &greedy].concat()).done().out);
        (found["token_ids"].clone(), found["prompt_tokens"].clone())
    };
    let template = ["--chat-template", "t.jinja", "--chat-template-kwargs", "{\"note\": \"M\"}"];
    let messages = |file: &str, more: &[&str]| text(&[&["--messages", file], &template[..], more].concat());
    assert_eq!(messages("asked.json", &[]), text(&["--prompt", "<user>Hi<|endoftext|>N<assistant>"]));
    assert_eq!(
        messages("asked.json", &["--tools", "tools.json"]),
        text(&["--prompt", "[{\"name\": \"f\"}]<user>Hi<|endoftext|>N<assistant>"])
    );
    assert_eq!(messages("begun.json", &[]), text(&["--prompt", "<user>Hi<|endoftext|><assistant>The sea"]));
    place.write("bad.json", r#"[{"content": "Hi"}]"#);
    refused(
        generate(&place, &[&["--messages", "bad.json"], &template[..]].concat()),
        2,
        "`bad.json`: `messages`: message 0 (from 0): `role` is missing",
    );
    refused(generate(&place, &["--messages", "asked.json"]), 2, "the model has no chat template");
    let list = [&["--messages", "asked.json"], &template[..2], &["--chat-template-kwargs", "[]"]].concat();
    refused(generate(&place, &list), 2, "takes a JSON object");
}

/// The model has no template.
#[test]
fn a_run_brings_its_template_and_what_that_is_told() {
    let place = Place::new();
    place.write("own.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}{{ note }}");
    let told = "data.chat_template_kwargs={ note = \" and a long note\" }";
    place.finetune(&["data.chat_template=own.jinja", told, "train.max_steps=1"]).done();
    place.write("asked.json", r#"{"messages": [{"role": "user", "content": "Hi"}]}"#);
    let tokens = |more: &[&str]| {
        let ask = ["generate", "run", "--messages", "asked.json", "--max-new-tokens", "1", "--format", "json"];
        last(&place.run(&[&ask, more].concat()).done().out)["prompt_tokens"].as_u64().unwrap()
    };
    assert!(tokens(&[]) > tokens(&["--chat-template-kwargs", "{\"note\": \"\"}"]));
}

#[test]
fn an_adapter_brings_its_cache() {
    let place = Place::new();
    place.run(&["finetune-lora", "--recipe", "recipe.toml", "--out", "run"]).done();
    let ask = ["--prompt-tokens", "5,6,7,8,9,10,11,12", "--max-new-tokens", "3", "--format", "json"];
    let of_run = last(&place.run(&[&["generate", "run"], &ask[..]].concat()).done().out);
    place.run(&["generate", "run", "--prompt-tokens", "5,6", "--save-session", "s"]).done();
    std::fs::rename(place.path("run/final"), place.path("alone")).unwrap();
    let alone = place.run(&[&["generate", "model", "--adapter", "alone"], &ask[..]].concat()).done();
    assert_eq!(last(&alone.out)["token_ids"], of_run["token_ids"]);
    // The policy of the run, with its cache of 32 slots and its chunks of 8, so that it goes on with a session of the run.
    let go_on = ["generate", "model", "--adapter", "alone", "--session", "s", "--prompt-tokens", "7", "--max-new-tokens", "1"];
    place.run(&go_on).done();
    let longer = [&go_on[..], &["--cache-length", "40"]].concat();
    refused(place.run(&longer), 3, "`kv_cache.cache_length`: expected 40, found 32");
    refused(place.run(&["generate", "alone", "--prompt", "x"]), 2, "`alone` is an adapter outside of a run");
}

#[test]
fn what_can_not_be_continued() {
    let place = Place::new();
    for (more, words) in [
        (&["--prompt", "x", "--temperature", "0"][..], "take the most likely token with `--greedy`"),
        (&["--prompt", "x", "--temperature", "-1"], "take the most likely token with `--greedy`"),
        (&["--prompt", "x", "--max-new-tokens", "40000"], "are more than the 32768 positions of the model"),
        (&["--prompt-tokens", "1,b"], "`--prompt-tokens` takes token ids with commas between them, found `1,b`"),
        (&["--prompt", ""], "the prompt has no tokens"),
        (&["--chat"], "the model has no chat template"),
        (&["--prompt-file", "nothing.txt"], "the prompt in `nothing.txt` cannot be read"),
    ] {
        refused(generate(&place, more), 2, words);
    }
    // Before it is read: then the token would be refused.
    for (to, words) in [("no/d.session", "cannot create `no/"), ("model", "`model` is a directory")] {
        let said = generate(&place, &["--prompt-tokens", "5,600", "--save-session", to]);
        refused(said, if to == "model" { 2 } else { 1 }, words);
    }
    let error = generate(&place, &["--prompt", "x", "--greedy", "--seed", "3"]).misused();
    assert!(error.contains("cannot be used with"), "{error}");
    let error = generate(&place, &["--prompt", "x", "--policy", "h2p"]).misused();
    assert!(error.contains("a similar value exists: 'h2o'"), "{error}");
    let nowhere = place.run(&["generate", "nowhere", "--prompt", "x"]);
    refused(nowhere, 2, "`nowhere` is neither a model, nor a run, nor a checkpoint");
    std::fs::remove_file(place.path("model/tokenizer.json")).unwrap();
    refused(generate(&place, &["--prompt", "x"]), 2, "give token ids with `--prompt-tokens 1,2,3`");
    refused(generate(&place, &["--prompt-tokens", "4,5", "--stop", "x"]), 2, "stop strings need text");
}
