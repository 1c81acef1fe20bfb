//! `/v1/responses` beside `/v1/chat/completions`: the same texts in another form, and what is refused.

use serde_json::{Value, json};

use super::{CHAT, EVICTS, Server, template};

const RESPONSES: &str = "POST /v1/responses";

/// A server whose model knows a chat template.
fn chatting(more: &[&str]) -> Server {
    let dir = tempfile::tempdir().unwrap();
    Server::start(&[more, &["--chat-template", &template(&dir)]].concat())
}

/// `body` with more fields.
fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn text_of(reply: &Value) -> &Value {
    &reply["output"][0]["content"][0]["text"]
}

fn status_of(reply: &Value) -> &str {
    reply["status"].as_str().unwrap()
}

#[test]
fn an_answer_is_that_of_a_chat() {
    let server = chatting(EVICTS);
    let conversation = json!([
        { "role": "system", "content": "Be brief." }, { "role": "user", "content": "Which sea is grey?" },
        { "role": "assistant", "content": "The North Sea." }, { "role": "user", "content": "And which is black?" },
    ]);
    let items = json!([
        { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "Which sea " }, { "type": "input_text", "text": "is grey?" }] },
        // As a reply has it.
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{ "type": "output_text", "text": "The North Sea.", "annotations": [] }],
        },
        { "role": "user", "content": "And which is black?" },
    ]);
    let mut begun = vec![json!({ "role": "developer", "content": "Be brief." })];
    begun.extend(items.as_array().unwrap().iter().cloned());
    for rules in [json!({ "temperature": 0 }), json!({ "seed": 3, "temperature": 0.7, "top_p": 0.9 })] {
        let chat = server.json(CHAT, &with(&rules, &json!({ "messages": conversation, "max_tokens": 20 })));
        let length = json!({ "max_output_tokens": 20 });
        for asked in [json!({ "input": items, "instructions": "Be brief." }), json!({ "input": begun })] {
            let reply = server.json(RESPONSES, &with(&with(&rules, &length), &asked));
            assert_eq!(*text_of(&reply), chat["choices"][0]["message"]["content"], "{asked}");
            assert_eq!(reply["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
            assert_eq!(reply["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
            assert_eq!(reply["usage"]["total_tokens"], chat["usage"]["total_tokens"]);
            assert_eq!(reply["kvtune"], chat["kvtune"]);
            assert_eq!(reply["temperature"], json!(rules["temperature"].as_f64()));
        }
    }
    let single = json!({ "temperature": 0, "messages": [{ "role": "user", "content": "The sea" }], "max_tokens": 8 });
    let text = server.json(CHAT, &single)["choices"][0]["message"]["content"].clone();
    let asked = json!({ "temperature": 0, "input": "The sea", "max_output_tokens": 8 });
    assert_eq!(*text_of(&server.json(RESPONSES, &asked)), text);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_reply_says_how_it_ended_and_what_was_asked_for() {
    let server = chatting(&["--set", "kv_cache.chunk_size=8"]);
    let asked = json!({
        "model": "model-qwen2", "input": "Which sea is grey?", "instructions": "Be brief.", "max_output_tokens": 5, "temperature": 0,
        "metadata": { "from": "a test" }, "ignore_eos": true,
        // What changes nothing is no mistake.
        "store": false, "background": false, "tools": [], "tool_choice": "auto", "truncation": "disabled", "include": [],
        "text": { "format": { "type": "text" }, "verbosity": "low" }, "reasoning": null, "previous_response_id": null,
    });
    let cut = server.json(RESPONSES, &asked);
    let item = &cut["output"][0];
    assert!(cut["id"].as_str().unwrap().starts_with("resp_") && item["id"].as_str().unwrap().starts_with("msg_"), "{cut}");
    assert_eq!(
        (&cut["object"], &cut["status"], &item["status"]),
        (&json!("response"), &json!("incomplete"), &json!("incomplete"))
    );
    assert_eq!(cut["incomplete_details"], json!({ "reason": "max_output_tokens" }));
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(item["content"], json!([{ "type": "output_text", "text": text_of(&cut), "annotations": [] }]));
    for (name, value) in [("instructions", json!("Be brief.")), ("max_output_tokens", json!(5)), ("store", json!(false))] {
        assert_eq!(cut[name], value);
    }
    assert_eq!(cut["metadata"], asked["metadata"]);
    assert_eq!(cut["usage"]["output_tokens"], 5);
    assert_eq!(cut["usage"]["input_tokens_details"]["cached_tokens"], 0);
    assert_eq!(cut["usage"]["output_tokens_details"], json!({ "reasoning_tokens": 0 }));
    // The same again goes on from a session that is held.
    let again = server.json(RESPONSES, &asked);
    assert_eq!(text_of(&again), text_of(&cut));
    let reused = again["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(reused > 0 && reused == server.metric("prompt_tokens_reused_total"), "{again}");
    // A text that ends by itself.
    let stop = text_of(&cut).as_str().unwrap().chars().next_back().unwrap().to_string();
    let ended = server.json(RESPONSES, &with(&asked, &json!({ "stop": stop })));
    assert_eq!((&ended["status"], &ended["output"][0]["status"]), (&json!("completed"), &json!("completed")));
    assert!(ended["incomplete_details"].is_null());
    assert!(text_of(&cut).as_str().unwrap().starts_with(text_of(&ended).as_str().unwrap()), "{ended}");
    assert_eq!(server.end(), Some(0));
}

#[test]
fn events_come_in_order_and_make_up_the_reply() {
    let server = chatting(EVICTS);
    let asked = json!({ "input": "Which sea is grey?", "max_output_tokens": 12, "temperature": 0, "ignore_eos": true });
    let first = server.json(RESPONSES, &asked);
    let stop = text_of(&first).as_str().unwrap().chars().next_back().unwrap().to_string();
    for asked in [asked.clone(), with(&asked, &json!({ "stop": stop }))] {
        let whole = server.json(RESPONSES, &asked);
        let (status, text) = server.ask(RESPONSES, &with(&asked, &json!({ "stream": true })));
        assert_eq!(status, 200, "{text}");
        // The sizes of HTTP's chunks are lines of their own.
        let lines = |start: &str| text.lines().filter_map(|line| line.strip_prefix(start)).map(str::to_owned).collect::<Vec<_>>();
        let names = lines("event: ");
        let events: Vec<Value> = lines("data: ").iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        assert!(names.iter().eq(events.iter().map(|event| event["type"].as_str().unwrap())), "{names:?}");
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], number);
        }
        let is_delta = |name: &&String| *name == "response.output_text.delta";
        let others: Vec<&str> = names.iter().filter(|name| !is_delta(name)).map(String::as_str).collect();
        let last = format!("response.{}", status_of(&whole));
        let before = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"];
        let after = ["response.output_text.done", "response.content_part.done", "response.output_item.done", &last];
        assert_eq!(others, [before, after].concat());
        let deltas = &events[before.len()..events.len() - after.len()];
        assert!(
            (deltas.len() > 1 || status_of(&whole) == "completed")
                && names[before.len()..].iter().take(deltas.len()).all(|name| is_delta(&name)),
            "{names:?}"
        );
        let joined: String = deltas.iter().filter_map(|event| event["delta"].as_str()).collect();
        assert_eq!(joined, *text_of(&whole));
        let [text_done, part_done, item_done, end] = &events[events.len() - after.len()..] else { panic!("{names:?}") };
        let response = &end["response"];
        let item = &response["output"][0];
        assert_eq!((&text_done["text"], &part_done["part"]), (text_of(&whole), &item["content"][0]));
        assert_eq!(&item_done["item"], item);
        for name in ["status", "incomplete_details", "kvtune", "metadata"] {
            assert_eq!(response[name], whole[name]);
        }
        assert_eq!(text_of(response), text_of(&whole));
        assert_eq!(response["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        for event in &events[..2] {
            assert_eq!((&event["response"]["id"], &event["response"]["status"]), (&response["id"], &json!("in_progress")));
        }
        assert_eq!(events[2]["item"]["id"], item["id"]);
        assert!(deltas.iter().all(|event| event["item_id"] == item["id"]));
    }
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_refusal_names_the_parameter() {
    let server = chatting(&[]);
    let message = |content: Value| json!([{ "role": "user", "content": content }]);
    let image = message(json!([{ "type": "input_image", "image_url": "x" }]));
    let file = message(json!([{ "type": "input_text", "text": "x" }, { "type": "input_file", "file_id": "x" }]));
    let function = json!([{ "type": "function", "name": "f", "parameters": {} }]);
    let schema = json!({ "format": { "type": "json_schema", "name": "x", "schema": {} } });
    for (more, param, words) in [
        (json!({ "input": null }), "input", "`input` is missing"),
        (json!({ "input": [] }), "input", "there is no message"),
        (json!({ "input": 3 }), "input", "a text or a list of messages"),
        (json!({ "input": ["x"] }), "input", "`input[0]`: an object"),
        (json!({ "input": [{ "role": "tool", "content": "x" }] }), "input", "`role` must be"),
        (json!({ "input": [{ "role": "user", "content": "x", "name": "y" }] }), "input", "there is no field `name`"),
        (json!({ "input": [{ "type": "item_reference", "id": "msg_1" }] }), "input", "`type` is \"item_reference\""),
        (json!({ "input": [{ "type": "function_call_output", "output": "x" }] }), "input", "\"function_call_output\""),
        (json!({ "input": message(json!([{ "type": "input_text" }])) }), "input", "neither `input_text` nor"),
        (json!({ "input": image }), "input", "neither `input_text` nor"),
        (json!({ "input": file }), "input", "neither `input_text` nor"),
        (json!({ "instructions": ["x"] }), "instructions", "must be a text"),
        (json!({ "store": true }), "store", "nothing is stored"),
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id", "nothing is stored"),
        (json!({ "conversation": "conv_1" }), "conversation", "nothing is stored"),
        (json!({ "tools": function }), "tools", "`tools` must be empty"),
        (json!({ "tool_choice": "required" }), "tool_choice", "is not supported but as"),
        (json!({ "background": true }), "background", "is not supported but as `false`"),
        (json!({ "truncation": "auto" }), "truncation", "is not supported but as"),
        (json!({ "include": ["message.output_text.logprobs"] }), "include", "is not supported but as `[]`"),
        (json!({ "reasoning": { "effort": "low" } }), "reasoning", "is not supported but as `{}`"),
        (json!({ "top_logprobs": 2 }), "top_logprobs", "is not supported but as `0`"),
        (json!({ "prompt": { "id": "pmpt_1" } }), "prompt", "there is no field `prompt`"),
        (json!({ "text": schema }), "text.format", "nothing but `verbosity`"),
        (json!({ "text": "plain" }), "text", "must be an object"),
        (json!({ "metadata": { "a": 1 } }), "metadata", "an object of texts"),
        (json!({ "stream": "yes" }), "stream", "must be true or false"),
        (json!({ "stream_options": { "x": 1 } }), "stream_options", "there is no field"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens", "a whole number from 1 to"),
        (json!({ "max_tokens": 5 }), "max_tokens", "is called `max_output_tokens` here"),
        (json!({ "temperature": -1 }), "temperature", "must be 0 or more"),
        (json!({ "top_p": 2 }), "top_p", "a number from 0 to 1"),
        (json!({ "n": 2 }), "n", "there is no field `n`"),
        (json!({ "messages": [] }), "messages", "there is no field `messages`"),
    ] {
        let (status, text) = server.ask(RESPONSES, &with(&json!({ "input": "x", "max_output_tokens": 1 }), &more));
        assert_eq!(status, 400, "{more}: {text}");
        let error = &serde_json::from_str::<Value>(&text).unwrap()["error"];
        assert!(error["param"] == param && error["message"].as_str().unwrap().contains(words), "{more}: {text}");
    }
    assert_eq!(server.ask(RESPONSES, &json!({ "input": "x", "model": "other" })).0, 404);
    assert_eq!(server.ask("GET /v1/responses", &Value::Null).0, 405);
    assert_eq!(server.end(), Some(0));
}

/// A stream that takes too long has told its beginning already.
#[test]
fn a_failure_in_the_middle_is_the_last_event() {
    let server = chatting(&["--timeout", "2"]);
    let (status, text) = server.ask(RESPONSES, &json!({ "input": "x", "stream": true, "ignore_eos": true }));
    let last = text.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!((status, &last["type"], &last["param"]), (200, &json!("error"), &Value::Null));
    assert!(last["message"].as_str().unwrap().contains("longer than 2 s") && last["sequence_number"].is_u64(), "{last}");
    assert_eq!(server.end(), Some(0));
}
