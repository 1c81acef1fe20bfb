//! The server beside clients: what they ask, what they get, and what happens to the server.

mod responses;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::binary::kvtune;
use crate::generation::{fixture, numbers, rows};

/// A server that ends with the test.
pub(crate) struct Server {
    process: Child,
    address: String,
}

impl Server {
    pub(crate) fn start(more: &[&str]) -> Self {
        Self::of(&fixture("model-qwen2"), more)
    }

    pub(crate) fn of(model: &Path, more: &[&str]) -> Self {
        Self::telling(model, more, Stdio::null())
    }

    /// Says elsewhere what it says on standard error.
    fn telling(model: &Path, more: &[&str], errors: Stdio) -> Self {
        let mut command = kvtune();
        command.arg("serve").arg(model).args(["--port", "0"]).args(more);
        let mut process = command.stdout(Stdio::piped()).stderr(errors).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit('/').next().unwrap().to_owned();
        Self { process, address }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    pub(crate) fn send(&self, head: &str, body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        write!(stream, "{head} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n").unwrap();
        // The server may have answered before it has read all.
        let _ = stream.write_all(body);
        stream
    }

    /// Status and body.
    pub(crate) fn ask(&self, head: &str, body: &Value) -> (u16, String) {
        received(self.send(head, body.to_string().as_bytes()))
    }

    fn json(&self, head: &str, body: &Value) -> Value {
        let (status, text) = self.ask(head, body);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.ask("GET /metrics", &Value::Null);
        let line = text.lines().find(|line| line.starts_with(&format!("kvtune_{name} "))).unwrap();
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// Resident memory in kilobytes.
    pub(crate) fn resident(&self) -> u64 {
        self.memory("VmRSS")
    }

    /// A figure of its memory in kilobytes.
    pub(crate) fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// The processes that it has started, and that go on.
    fn children(&self) -> Vec<String> {
        let parent = self.process.id().to_string();
        let all = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        all.filter(|pid| state_of(pid).is_some_and(|(state, own)| state != "Z" && own == parent)).collect()
    }

    /// Asks it to end, and waits; returns the exit code.
    pub(crate) fn end(mut self) -> Option<i32> {
        Command::new("kill").args(["-TERM", &self.process.id().to_string()]).status().unwrap();
        self.process.wait().unwrap().code()
    }
}

/// State and parent of a process.
fn state_of(pid: &str) -> Option<(String, String)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit(')').next()?.split_whitespace().map(str::to_owned);
    fields.next().zip(fields.next())
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn received(mut stream: TcpStream) -> (u16, String) {
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    let text = String::from_utf8_lossy(&all).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, body.to_owned())
}

const COMPLETIONS: &str = "POST /v1/completions";
const CHAT: &str = "POST /v1/chat/completions";
const EVICTS: &[&str] = &["--policy", "h2o", "--cache-length", "24", "--set", "kv_cache.chunk_size=8"];

/// A template of our own: the model of the fixtures has none.
fn template(dir: &tempfile::TempDir) -> String {
    let path = dir.path().join("chat.jinja");
    let text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn a_harness_reads_the_likelihoods_of_transformers() {
    let server = Server::start(&[]);
    for row in rows("likelihoods.jsonl") {
        // As lm-evaluation-harness asks.
        let reply = server.json(
            COMPLETIONS,
            &json!({ "model": "model-qwen2", "prompt": [row["prompt"]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true, "seed": 1234 }),
        );
        let choice = &reply["choices"][0];
        let found = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        let expected = row["log_probabilities"].as_array().unwrap();
        assert_eq!(found.len(), expected.len() + 1, "an entry for each token of the prompt, and the new one");
        assert!(found[0].is_null());
        for ((found, expected), most_likely) in
            found[1..].iter().zip(expected).zip(&choice["logprobs"]["top_logprobs"].as_array().unwrap()[1..])
        {
            let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((found - expected).abs() < 1e-4, "{found}, expected {expected}");
            // A token counts as the most likely one if both numbers are the same.
            let highest = most_likely.as_object().unwrap().values().filter_map(Value::as_f64).fold(f64::NEG_INFINITY, f64::max);
            assert!(found <= highest, "{found} {highest}");
        }
        assert_eq!(choice["token_ids"], json!([*numbers(&row["tokens"]).last().unwrap()]));
        assert_eq!(reply["usage"]["prompt_tokens"], row["prompt"].as_array().unwrap().len());
    }
    assert_eq!(server.end(), Some(0));
}

/// A request with one more field.
fn with(body: &Value, name: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[name] = value;
    body
}

#[test]
fn texts_are_the_same_whole_and_in_parts_and_say_what_was_used() {
    let dir = tempfile::tempdir().unwrap();
    let template = template(&dir);
    let server = Server::start(&[EVICTS, &["--chat-template", &template]].concat());
    let chat = json!({ "messages": [{ "role": "user", "content": "Which sea is grey?" }], "max_tokens": 20, "seed": 3, "n": 2 });
    let whole = server.json(CHAT, &chat);
    // As a harness writes messages.
    let typed = json!({ "messages": [{ "role": "user", "type": "text", "content": "Which sea is grey?" }], "max_tokens": 20, "seed": 3, "n": 2 });
    assert_eq!(server.json(CHAT, &typed)["choices"], whole["choices"]);
    let streamed = with(&with(&chat, "stream", json!(true)), "stream_options", json!({ "include_usage": true }));
    let (status, events) = server.ask(CHAT, &streamed);
    assert_eq!(status, 200);
    let events: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(events.last(), Some(&"[DONE]"));
    let events: Vec<Value> = events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let long =
        json!({ "messages": [{ "role": "user", "content": "Which sea is grey?" }], "max_tokens": 40_000, "top_logprobs": 0 });
    let (status, error) = server.ask(CHAT, &long);
    assert!(status == 400 && error.contains("\"param\":\"messages\""), "{error}");
    // Each token has its id in an event, whatever its text is.
    let plain = json!({ "prompt": "The sea", "max_tokens": 20, "seed": -5, "n": 2 });
    let expected = server.json(COMPLETIONS, &plain)["choices"].clone();
    let (_, parts) = server.ask(COMPLETIONS, &with(&plain, "stream", json!(true)));
    let parts: Vec<Value> = parts.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
    for index in 0..2 {
        let of_choice = parts.iter().map(|part| &part["choices"][0]).filter(|choice| choice["index"] == index);
        let ids: Vec<Value> = of_choice.flat_map(|choice| choice["token_ids"].as_array().unwrap().clone()).collect();
        assert_eq!(json!(ids), expected[index]["token_ids"]);
    }
    for index in 0..2 {
        let of_choice = |event: &Value| event["choices"].as_array().unwrap().iter().find(|c| c["index"] == index).cloned();
        let parts: Vec<Value> = events.iter().filter_map(of_choice).collect();
        let text: String = parts.iter().filter_map(|part| part["delta"]["content"].as_str()).collect();
        assert_eq!(text, whole["choices"][index]["message"]["content"]);
        assert_eq!(parts.last().unwrap()["finish_reason"], whole["choices"][index]["finish_reason"]);
    }
    assert_eq!(events.last().unwrap()["usage"], whole["usage"]);
    assert_eq!(whole["kvtune"]["policy"], "h2o");
    assert!(whole["kvtune"]["evicted"].as_u64().unwrap() > 0, "{whole}");
    let tokens = server.json("POST /tokenize", &json!({ "prompt": "The sea" }));
    assert_eq!(server.json("POST /detokenize", &json!({ "tokens": tokens["tokens"] }))["prompt"], "The sea");
    let special = json!({ "tokens": [1, 2] });
    assert_eq!(server.json("POST /detokenize", &special)["prompt"], "<|im_start|><|im_end|>");
    let (status, error) = server.ask("POST /detokenize", &json!({ "tokens": [1, 512] }));
    assert!(
        status == 400 && error.contains("token 512 is not in the vocabulary of 512") && error.contains("\"tokens\""),
        "{error}"
    );
    // As who scores texts asks.
    let scored = json!({ "prompt": ["<|im_start|>The sea"], "max_tokens": 0, "echo": true, "logprobs": 1 });
    let reply = server.json(COMPLETIONS, &scored);
    let (choice, count) = (&reply["choices"][0], reply["usage"]["prompt_tokens"].as_u64().unwrap() as usize);
    assert_eq!((&choice["text"], &choice["token_ids"]), (&json!("<|im_start|>The sea"), &json!([])));
    assert_eq!(
        (choice["logprobs"]["tokens"].as_array().unwrap().len(), &reply["usage"]["completion_tokens"]),
        (count, &json!(0))
    );
    let of_ids = server.json(COMPLETIONS, &json!({ "prompt": [1, 9], "max_tokens": 0, "echo": true }));
    assert!(of_ids["choices"][0]["text"].as_str().unwrap().starts_with("<|im_start|>"), "{of_ids}");
    let of_ruler =
        server.json("PUT /generate", &json!({ "prompt": "The sea", "max_tokens": 4, "temperature": 0, "top_k": 32, "stop": [] }));
    assert_eq!(of_ruler["text"].as_array().unwrap().len(), 1);
}

#[test]
fn equal_prompts_have_texts_of_their_own_unless_a_seed_is_named() {
    let server = Server::start(&[]);
    let twice = json!({ "prompt": ["The sea", "The sea"], "max_tokens": 20 });
    let differ = |body: &Value| {
        let choices = &server.json(COMPLETIONS, body)["choices"];
        choices[0]["token_ids"] != choices[1]["token_ids"]
    };
    assert!(differ(&twice) && !differ(&with(&twice, "seed", json!(3))));
}

#[test]
fn a_template_is_told_of_tools_and_of_what_else_a_request_says() {
    let template = "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls[0].function.arguments.x if m.tool_calls }}|\
                    {% endfor %}{{ note }}{% if add_generation_prompt %}<assistant>{% endif %}";
    let server = Server::start(&["--chat-template", template]);
    let greedy = |mut body: Value| {
        body["temperature"] = json!(0);
        body["max_tokens"] = json!(6);
        body
    };
    let said = |body: Value| server.json(CHAT, &greedy(body))["choices"][0]["message"]["content"].clone();
    let text = |prompt: &str| server.json(COMPLETIONS, &greedy(json!({ "prompt": prompt })))["choices"][0]["text"].clone();
    let user = json!({ "role": "user", "content": [{ "type": "text", "text": "The " }, { "type": "text", "text": "sea" }] });
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    assert_eq!(
        said(json!({ "messages": [user], "tools": tools, "chat_template_kwargs": { "note": "N" } })),
        text("[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]<user>The sea|N<assistant>")
    );
    let called = json!({ "role": "assistant", "content": null, "tool_calls": [{ "function": { "name": "f", "arguments": "{\"x\": \"7\"}" } }] });
    assert_eq!(said(json!({ "messages": [user, called] })), text("<user>The sea|<assistant>None7|<assistant>"));
    let begun = json!({ "role": "assistant", "content": "is" });
    let continued = json!({ "messages": [user, begun], "continue_final_message": true, "add_generation_prompt": false });
    assert_eq!(said(continued), text("<user>The sea|<assistant>is"));
    for (body, words) in [
        (
            json!({ "messages": [user, begun], "continue_final_message": true, "add_generation_prompt": true }),
            "exclude each other",
        ),
        (json!({ "messages": [{ "content": "x" }] }), "`messages`: message 0 (from 0): `role` is missing"),
        (json!({ "messages": [user], "tools": 3 }), "`tools`: a list of objects is expected"),
        (json!({ "messages": [user], "chat_template_kwargs": [] }), "`chat_template_kwargs`: an object is expected"),
    ] {
        let (status, text) = server.ask(CHAT, &body);
        assert!(status == 400 && text.contains(words), "{words}: {status} {text}");
    }
    assert_eq!(server.end(), Some(0));
}

#[test]
fn who_asks_wrongly_is_told_and_the_server_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "secret\n").unwrap();
    let server = Server::start(&["--max-body", "100000", "--timeout", "2"]);
    let asked = |body: Value| server.ask(COMPLETIONS, &body);
    for (body, status, words) in [
        (json!([1]), 400, "the body must be a JSON object"),
        (json!({}), 400, "`prompt` is missing"),
        (json!({ "prompt": 3 }), 400, "`prompt` must be a text, a list of texts"),
        (json!({ "prompt": "x", "n": "two" }), 400, "`n` must be a whole number from 1 to 64"),
        (json!({ "prompt": "x", "temprature": 1 }), 400, "there is no field `temprature`"),
        (json!({ "prompt": "x", "temperature": -1 }), 400, "`temperature` must be 0 or more"),
        (json!({ "prompt": "x", "presence_penalty": 3 }), 400, "a number from -2 to 2"),
        (json!({ "prompt": [[9999]] }), 400, "token 9999 of the prompt is not in the vocabulary"),
        (json!({ "prompt": "x", "max_tokens": 1_000_000 }), 400, "are more than the"),
        (
            json!({ "prompt": [5], "suppress_tokens": (0..512).collect::<Vec<_>>(), "typical_p": 0.9 }),
            400,
            "no token can come next",
        ),
        (json!({ "prompt": "x", "max_new_tokens": 2, "max_tokens": 1 }), 400, "`max_tokens` and `max_new_tokens` contradict"),
        (json!({ "prompt": "x", "stream": true, "echo": true }), 400, "`stream` goes with none of"),
        (json!({ "prompt": vec![[5, 6]; 100] }), 400, "a request has 100 prompts; 64 can wait at most"),
        (json!({ "prompt": "x", "model": "other" }), 404, "the model `other` does not exist"),
        (json!({ "prompt": "x".repeat(200_000) }), 413, "the body is larger than 100000 bytes"),
    ] {
        let (found, text) = asked(body);
        assert!(found == status && text.contains(words) && text.starts_with("{\"error\":"), "{status} {words}: {found} {text}");
    }
    let (status, text) = asked(json!({ "prompt": [5], "max_tokens": null, "max_completion_tokens": 2 }));
    assert_eq!(status, 200, "a null says nothing: {text}");
    let (status, text) = received(server.send(COMPLETIONS, b"{\"prompt\": "));
    assert!(status == 400 && text.contains("the body is no JSON"), "{status} {text}");
    let (status, text) = server.ask(CHAT, &json!({ "messages": [] }));
    assert!(status == 400 && text.contains("this model has no chat template"), "{text}");
    assert_eq!(server.ask("GET /v1/nothing", &Value::Null).0, 404);
    assert_eq!(server.ask("DELETE /v1/models", &Value::Null).0, 405);
    for (path, body, field) in [
        ("POST /tokenize", json!({ "prompt": "The sea", "add_special_token": false }), "add_special_token"),
        ("POST /tokenize", json!({ "prompt": "The sea", "messages": [{"role": "user", "content": "a"}] }), "messages"),
        ("POST /detokenize", json!({ "tokens": [1], "skip": true }), "skip"),
    ] {
        let (status, error) = server.ask(path, &body);
        assert!(status == 400 && error.contains(&format!("\"param\":\"{field}\"")), "{error}");
    }
    // What is wrong comes before what was not read because of it.
    let chat = json!({ "messages": [{"role": "user", "content": "a"}], "add_generation_prompt": true });
    assert!(server.ask("POST /tokenize", &chat).1.contains("no chat template"));
    let info = server.json("GET /tokenizer_info", &Value::Null);
    assert_eq!(info["eos_token"], "<|endoftext|>", "without a chat template, too: {info}");
    // A client that says how much it will send, and does not.
    let mut slow = server.connect();
    write!(slow, "{COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 50\r\n\r\n{{").unwrap();
    let (status, text) = received(slow);
    assert!(status == 504 && text.contains("the request has taken longer than 2 s"), "{status} {text}");
    assert_eq!(server.json("GET /v1/models", &Value::Null)["data"][0]["id"], "model-qwen2");
    assert_eq!(server.end(), Some(0));
    let locked = Server::start(&["--api-key-file", key.to_str().unwrap()]);
    assert_eq!(locked.ask("GET /v1/models", &Value::Null).0, 401);
    assert_eq!(locked.ask("GET /v1/models HTTP/1.1\r\nAuthorization: Bearer secret\r\nX: y", &Value::Null).0, 200);
    assert_eq!(locked.ask("GET /v1/models HTTP/1.1\r\nAuthorization: bearer  secret\r\nX: y", &Value::Null).0, 200);
    assert_eq!(locked.ask("GET /health", &Value::Null).0, 200);
}

/// What a client takes to send the body counts.
#[test]
fn a_request_may_take_its_time_once() {
    let server = Server::start(&["--timeout", "2"]);
    let body = json!({ "prompt": [5], "max_tokens": 30_000, "ignore_eos": true }).to_string();
    let (began, mut late, length) = (Instant::now(), server.connect(), body.len());
    write!(late, "{COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n").unwrap();
    thread::sleep(Duration::from_millis(1500));
    late.write_all(body.as_bytes()).unwrap();
    let (status, text) = received(late);
    assert!(status == 504 && began.elapsed() < Duration::from_millis(3400), "{:?}: {status} {text}", began.elapsed());
}

/// A document with questions, where entries leave; a conversation, where none do.
#[test]
fn what_a_held_session_has_read_is_not_read_again() {
    let document: Vec<u32> = (0..70).map(|i| i * i * 5 % 400 + 9).collect();
    let ask = |server: &Server, prompt: &[u32]| {
        numbers(&server.json(COMPLETIONS, &json!({ "prompt": [prompt], "max_tokens": 8, "seed": 4 }))["choices"][0]["token_ids"])
    };
    let fixed: &[&str] = &["--policy", "dense", "--cache-length", "512"];
    // Prompts that share four whole chunks, and go on otherwise.
    let small: &[&str] = &["--set", "kv_cache.chunk_size=16"];
    let (holds, reads) = (Server::start(small), Server::start(&[small, &["--keep", "0"]].concat()));
    for turn in 0..3 {
        let prompt = [&document[..], &[turn + 20; 9]].concat();
        assert_eq!(ask(&holds, &prompt), ask(&reads, &prompt), "{turn}");
    }
    assert_eq!(holds.metric("prompt_tokens_reused_total"), 2 * 64);
    for policy in [EVICTS, &[], fixed] {
        let (holds, reads) = (Server::start(policy), Server::start(&[policy, &["--keep", "0"]].concat()));
        let mut prompt = document.clone();
        for turn in 0..3 {
            let question = (0..6).map(|i| (turn * 50 + i) % 400 + 9);
            prompt.truncate(if policy == EVICTS { document.len() } else { prompt.len() });
            prompt.extend(question);
            let answer = ask(&reads, &prompt);
            assert_eq!(ask(&holds, &prompt), answer, "{policy:?}, {turn}");
            prompt.extend(answer);
        }
        assert_eq!(reads.metric("prompt_tokens_reused_total"), 0);
        let reused = holds.metric("prompt_tokens_reused_total");
        assert!(reused >= 2 * 40, "{policy:?}");
        if policy == EVICTS {
            // What has just been read stays, though an older one has read on from there.
            let other: Vec<u32> = document.iter().rev().copied().collect();
            for further in [100..180, 200..206, 250..256] {
                ask(&holds, &[&other[..], &further.collect::<Vec<u32>>()].concat());
            }
            assert!(holds.metric("prompt_tokens_reused_total") - reused >= 40);
        }
        if policy.is_empty() {
            // Two conversations that take turns keep their places.
            let mut talks = [30, 60].map(|start| (start..start + 40).collect::<Vec<u32>>());
            for talk in [0, 1, 0, 1, 0, 1] {
                let answer = ask(&holds, &talks[talk]);
                talks[talk].extend(answer.into_iter().chain([20]));
            }
            assert!(holds.metric("prompt_tokens_reused_total") - reused >= 4 * 40);
        }
    }
}

/// Their chunks end where a prompt does, and behind its chunk an entry is rounded.
#[test]
fn a_held_session_of_windows_in_int4_is_read_again() {
    let model = fixture("families/model-mistral");
    let sizes = ["kv_cache.cache_length=64", "kv_cache.chunk_size=4", "kv_cache.buffer=int4"];
    let set = [&["--policy", "h2o"][..], &sizes.map(|set| ["--set", set]).concat()].concat();
    let (holds, reads) = (Server::of(&model, &set), Server::of(&model, &[&set, &["--keep", "0"][..]].concat()));
    let document: Vec<usize> = (0..60).map(|i| 5 + 3 * i).collect();
    for prompt in [&document[..30], &document] {
        let body = json!({ "prompt": [prompt], "max_tokens": 4, "temperature": 0, "logprobs": 1 });
        let [held, read] = [&holds, &reads].map(|server| server.json(COMPLETIONS, &body));
        assert_eq!(held["choices"], read["choices"]);
        assert_eq!(held["kvtune"]["cache_length"], json!([24, 24]), "the windows: {held}");
    }
}

/// The one that shares most has dropped what the prompt needs.
#[test]
fn a_held_session_serves_where_a_longer_one_can_not_go_back() {
    let server = Server::of(&fixture("families/model-olmo3"), &["--set", "kv_cache.chunk_size=4"]);
    let ask = |prompt: &[u32]| {
        let body = json!({ "prompt": [prompt], "max_tokens": 4, "temperature": 0, "ignore_eos": true });
        numbers(&server.json(COMPLETIONS, &body)["choices"][0]["token_ids"])
    };
    let mut talk: Vec<u32> = (5..25).collect();
    talk.extend(ask(&talk));
    talk.extend(30..90);
    ask(&talk);
    let reused = server.metric("prompt_tokens_reused_total");
    ask(&[&talk[..50], &[7, 8]].concat());
    assert_eq!(server.metric("prompt_tokens_reused_total") - reused, 23);
}

#[test]
fn what_can_not_be_carried_out_is_refused_before_a_stream_begins() {
    // It has no tokenizer.
    let server = Server::of(&fixture("families/model-mistral"), &[]);
    for (body, words, refused) in [
        (json!({ "prompt": [[5]], "max_tokens": 0, "max_completion_tokens": 1, "echo": true }), "contradict each other", 0),
        (json!({ "prompt": [[5]], "stop": "x", "stream": true }), "stop strings need text", 1),
        (json!({ "prompt": vec![[5]; 100], "stream": true }), "a request has 100 prompts", 101),
    ] {
        let (status, text) = server.ask(COMPLETIONS, &body);
        assert!(status == 400 && text.contains(words), "{status} {text}");
        assert_eq!(server.metric("requests_refused_total"), refused, "prompts, not requests that mean nothing: {words}");
    }
}

#[test]
fn who_sends_no_whole_head_is_let_go() {
    let server = Server::start(&["--header-timeout", "1"]);
    let begin = Instant::now();
    let silent = server.connect();
    let mut half = server.connect();
    write!(half, "{COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n").unwrap();
    // A line every now and then does not help.
    let mut dripping = server.connect();
    let drips = dripping.try_clone().unwrap();
    let drip = thread::spawn(move || {
        write!(&drips, "{COMPLETIONS} HTTP/1.1\r\n").unwrap();
        (0..100).take_while(|i| write!(&drips, "X-{i}: y\r\n").is_ok()).for_each(|_| thread::sleep(Duration::from_millis(100)));
    });
    for mut stream in [silent, half] {
        // To its end, which comes from the server.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let _ = dripping.read_to_end(&mut Vec::new());
    drip.join().unwrap();
    assert!((1..8).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
    assert_eq!(server.ask("GET /health", &Value::Null).0, 200);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn many_clients_half_of_whom_go_away_leave_nothing_behind() {
    let server = Server::start(&[EVICTS, &["--batch", "8", "--keep", "0"]].concat());
    let body = |i: usize| {
        let prompt: Vec<usize> = (0..20 + i % 7 * 9).map(|at| (at * at + i % 13) % 450 + 9).collect();
        json!({ "prompt": [prompt], "max_tokens": 4 + i % 7, "seed": i % 13 })
    };
    let text = |reply: &Value| reply["choices"][0]["token_ids"].clone();
    let alone: Vec<Value> = (0..91).map(|i| text(&server.json(COMPLETIONS, &body(i)))).collect();
    let before = server.resident();
    let (next, requests) = (AtomicUsize::new(0), 1000);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= requests {
                        break;
                    }
                    if i % 2 == 1 {
                        // Goes away at some time after it has asked.
                        let stream = server.send(COMPLETIONS, body(i).to_string().as_bytes());
                        thread::sleep(Duration::from_millis((i * 7 % 23) as u64));
                        drop(stream);
                    } else {
                        assert_eq!(text(&server.json(COMPLETIONS, &body(i))), alone[i % 91], "{i}");
                    }
                }
            });
        }
    });
    while server.metric("requests_waiting") + server.metric("texts_running") > 0 {
        thread::sleep(Duration::from_millis(20));
    }
    // Who goes away in the middle of a long text ends it, whole or streamed.
    let gone = server.metric("requests_cancelled_total");
    for streams in [false, true] {
        let long = json!({ "prompt": [[5, 6, 7]], "max_tokens": 30_000, "ignore_eos": true, "stream": streams });
        let stream = server.send(COMPLETIONS, long.to_string().as_bytes());
        while server.metric("texts_running") == 0 {
            thread::sleep(Duration::from_millis(5));
        }
        drop(stream);
        while server.metric("texts_running") > 0 {
            thread::sleep(Duration::from_millis(5));
        }
    }
    assert_eq!(server.metric("requests_cancelled_total"), gone + 2);
    let after = server.resident();
    println!("resident: {before} kB before, {after} kB after {requests} requests");
    assert_eq!(server.metric("requests_failed_total") + server.metric("requests_refused_total"), 0);
    assert_eq!(server.metric("cache_entries"), 0);
    assert!(after < before + before / 50, "{before} kB, then {after} kB");
    assert_eq!(server.end(), Some(0));
}

/// A page in somebody's browser, and a name of somebody else's that leads here.
#[test]
fn only_own_names_and_allowed_origins_may_ask() {
    let server = Server::start(&["--allow-origin", "https://chat.example", "--allow-host", "models.example"]);
    let ask = |head: &str, headers: &str| {
        let mut stream = server.connect();
        let body = "{\"prompt\": \"x\", \"max_tokens\": 1}";
        let length = body.len();
        write!(stream, "{head} HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        (text.split(' ').nth(1).unwrap().parse::<u16>().unwrap(), text)
    };
    let own = &server.address;
    let json = "Content-Type: application/json\r\n";
    for (headers, status, words) in [
        (format!("Host: {own}\r\nContent-Type: text/plain\r\n"), 415, "`Content-Type: application/json`"),
        (format!("Host: {own}\r\n"), 415, "`Content-Type: application/json`"),
        (format!("Host: evil.example\r\n{json}"), 403, "`--allow-host`"),
        (format!("Host: 192.0.2.1:80\r\n{json}"), 403, "`--allow-host`"),
        (format!("Host: {own}\r\nOrigin: https://evil.example\r\n{json}"), 403, "`--allow-origin`"),
        (format!("Host: {own}\r\nOrigin: null\r\n{json}"), 403, "`--allow-origin`"),
        (format!("Host: Models.example:8000\r\n{json}"), 200, "text_completion"),
        (format!("Host: [::1]:8000\r\n{json}"), 200, "text_completion"),
        (
            "Host: localhost\r\nOrigin: http://localhost\r\nContent-Type: application/json; charset=utf-8\r\n".to_owned(),
            200,
            "text",
        ),
        (
            format!("Host: {own}\r\nOrigin: https://chat.example\r\n{json}"),
            200,
            "access-control-allow-origin: https://chat.example",
        ),
    ] {
        let (found, text) = ask(COMPLETIONS, &headers);
        assert!(found == status && text.contains(words), "{headers}: {found} {text}");
    }
    let preflight = "Access-Control-Request-Method: POST\r\n";
    let (status, text) = ask("OPTIONS /v1/completions", &format!("Host: {own}\r\nOrigin: https://chat.example\r\n{preflight}"));
    assert!(status == 204 && text.contains("access-control-allow-headers: authorization, content-type"), "{text}");
    let asks = format!(
        "Host: {own}\r\nOrigin: https://chat.example\r\nAccess-Control-Request-Headers: x-stainless-os,authorization\r\n{preflight}"
    );
    assert!(ask("OPTIONS /v1/completions", &asks).1.contains("access-control-allow-headers: x-stainless-os,authorization"));
    assert_eq!(ask("OPTIONS /v1/completions", &format!("Host: {own}\r\nOrigin: https://evil.example\r\n{preflight}")).0, 403);
    let models = server.json("GET /v1/models", &Value::Null);
    assert_eq!(models["data"][0]["root"], "model-qwen2", "and not its directory");
    assert_eq!(server.json("GET /v1/models/model-qwen2", &Value::Null), models["data"][0]);
    let (status, text) = server.ask("GET /v1/models/an/other", &Value::Null);
    assert!(status == 404 && text.contains("model_not_found"), "{text}");
    assert_eq!(server.end(), Some(0));
}

#[test]
fn each_request_has_a_line_in_the_access_log() {
    let said = tempfile::NamedTempFile::new().unwrap();
    let model = fixture("model-qwen2");
    let server = Server::telling(&model, &[], said.reopen().unwrap().into());
    let body = json!({ "prompt": [[5, 6, 7]], "max_tokens": 4, "ignore_eos": true });
    server.json(COMPLETIONS, &body);
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    assert_eq!(server.ask(COMPLETIONS, &streamed).0, 200);
    assert_eq!(server.ask("GET /v1/\u{9b}31m?key=secret", &Value::Null).0, 404);
    let long = json!({ "prompt": [[5, 6, 7]], "max_tokens": 30_000, "ignore_eos": true });
    // A byte of a next request does not hide that the client has gone.
    let stream = server.send(COMPLETIONS, long.to_string().as_bytes());
    (&stream).write_all(b"G").unwrap();
    while server.metric("texts_running") == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    drop(stream);
    let gone = Instant::now();
    while server.metric("texts_running") > 0 {
        thread::sleep(Duration::from_millis(50));
    }
    assert!(gone.elapsed() < Duration::from_secs(8), "{:?}", gone.elapsed());
    assert_eq!(server.end(), Some(0));
    let said = std::fs::read_to_string(said.path()).unwrap();
    let lines: Vec<&str> = said.lines().filter(|line| line.contains(" POST ") || line.contains(" 404 ")).collect();
    let parts = [" POST /v1/completions 200 3 tokens in, 4 out, "; 2];
    for (line, part) in lines.iter().zip(parts.into_iter().chain([" 404 0 tokens in", " 499 3 tokens in"])) {
        assert!(line.contains(part) && line.contains("Z 127.0.0.1:") && line.ends_with(" s"), "{line}");
    }
    assert!(lines.len() == 4 && !said.contains("secret") && !said.contains('\u{9b}'), "{said}");
    let quiet = tempfile::NamedTempFile::new().unwrap();
    let server = Server::telling(&model, &["--no-access-log", "--host", "0.0.0.0"], quiet.reopen().unwrap().into());
    server.metric("texts_running");
    assert_eq!(server.end(), Some(0));
    let quiet = std::fs::read_to_string(quiet.path()).unwrap();
    assert!(!quiet.contains("GET") && quiet.contains("listens on `0.0.0.0`: others than this machine"), "{quiet}");
}

/// A template that overflows the stack of its process, and what is left of that when the server is killed.
#[test]
fn a_template_can_not_end_the_server_and_its_processes_end_with_it() {
    let overflows = "{% set a = namespace() %}{% set a.x = a %}{% if messages[0].content == 'deep' %}{{ {a: 1} }}{% endif %}x";
    let server = Server::start(&["--chat-template", overflows]);
    let chat = |text: &str| server.ask(CHAT, &json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 1 }));
    for _ in 0..2 {
        let (status, text) = chat("deep");
        assert!(status == 400 && text.contains("it is nested too deep"), "{status} {text}");
        assert_eq!(chat("flat").0, 200);
    }
    let children = server.children();
    assert_eq!(children.len(), 1, "one renders, and those that have ended are waited for");
    drop(server);
    let began = Instant::now();
    while children.iter().any(|pid| state_of(pid).is_some_and(|(state, _)| state != "Z")) {
        assert!(began.elapsed() < Duration::from_secs(20), "it outlives its server");
        thread::sleep(Duration::from_millis(20));
    }
}
