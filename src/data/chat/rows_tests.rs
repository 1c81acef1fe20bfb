//! Rows of conversations, as they are trained, asked and refused.

use crate::data::Targets;
use crate::data::fixtures::{Fixture, tokenizer};
use crate::recipe::{Boundary, OnTooLong, TemplateChoice, TrainOn};
use crate::units::Fault;

const TEMPLATE: &str = "{{ tools | tojson if tools }}{{ note }}{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}\
    {{ m.tool_calls | tojson if m.tool_calls }}{{ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn fixture(format: &str, content: &str) -> Fixture {
    let mut fixture = Fixture::new(format, content);
    fixture.recipe.chat.chat_template = Some(TemplateChoice(TEMPLATE.to_owned()));
    fixture
}

/// The text of each sample, with what is trained in brackets.
fn shown(fixture: &Fixture) -> Result<Vec<String>, Fault> {
    let train = fixture.open()?.train;
    let text = |ids: &[u32]| ids.iter().map(|&id| tokenizer().token_text(id).unwrap()).collect::<String>();
    let sample = |index: usize| {
        let sequence = train.batch(&[index]).unwrap().sequences.swap_remove(0);
        let Targets::NextToken(targets) = sequence.targets else { panic!("a class") };
        let (mut out, mut run, mut inside) = (String::new(), vec![sequence.inputs[0]], false);
        for (&target, next) in targets.iter().zip(sequence.inputs[1..].iter().map(Some).chain([None])) {
            if (target >= 0) != inside {
                out = out + &text(&std::mem::take(&mut run)) + if inside { "]" } else { "[" };
                inside = !inside;
            }
            run.extend(next.copied().or(u32::try_from(target).ok()));
        }
        out + &text(&run) + if inside { "]" } else { "" }
    };
    Ok((0..train.len()).map(sample).collect())
}

#[test]
fn each_format_is_a_conversation() {
    let one = |format, content: &str| shown(&fixture(format, content)).unwrap().swap_remove(0);
    let turn = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let answered = |text: &str| format!("<|im_start|>assistant\n[{text}<|im_end|>\n]");
    let asked = turn("system", "S") + &turn("user", "q") + &answered("a");
    let messages = r#"{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]"#;
    assert_eq!(one("messages", &format!("{messages}}}")), asked);
    assert_eq!(one("messages", &format!("{messages}, \"chat_template_kwargs\": {{\"note\": \"N\"}}}}")), format!("N{asked}"));
    let tools = r#"[{"name": "f"}]"#;
    for given in [tools.to_owned(), serde_json::to_string(tools).unwrap()] {
        let row = format!("{messages}, \"tools\": {given}, \"x\": 1}}");
        assert_eq!(one("messages", &row).replacen('[', "", 1), format!("{tools}{asked}").replacen('[', "", 1));
    }
    let turns = r#"{"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
    assert_eq!(one("sharegpt", turns), asked);
    let call = r#"{"system": "S", "conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{\"name\": \"f\"}"}]}"#;
    let calls = r#"{"type": "function", "function": {"name": "f"}}"#;
    assert_eq!(one("sharegpt", call), asked.replace("[a", &format!("[[{calls}]")));
    let alpaca = r#"{"instruction": "i", "input": "n", "output": "a", "system": "S", "history": [["p", "r"]]}"#;
    let history = turn("system", "S") + &turn("user", "p") + &answered("r") + &turn("user", "i\nn") + &answered("a");
    assert_eq!(one("alpaca", alpaca), history);
    assert_eq!(one("alpaca", r#"{"instruction": "q", "input": "", "output": "a"}"#), turn("user", "q") + &answered("a"));
    let pair = r#"{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}"#;
    assert_eq!(one("prompt-completion", pair), turn("user", "q") + &answered("a"));
    let mut tagged = fixture("sharegpt", &turns.replace("gpt", "bot"));
    tagged.recipe.chat.roles.insert("bot".to_owned(), "assistant".to_owned());
    assert_eq!(shown(&tagged).unwrap()[0], asked);
}

#[test]
fn the_recipe_says_what_is_trained() {
    let rows = r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b", "train": true}]}"#;
    let mut chat = fixture("messages", rows);
    let all = shown(&chat).unwrap().swap_remove(0);
    assert!(all.ends_with("a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>\n]"), "{all}");
    chat.recipe.chat.train_on_end_of_turn = false;
    assert_eq!(
        shown(&chat).unwrap()[0],
        all.replace("[b<|im_end|>\n]", "[b]<|im_end|>"),
        "the last token would only be a target"
    );
    chat.recipe.chat.train_on = Some(TrainOn::All);
    assert!(
        shown(&chat).unwrap()[0]
            .starts_with("<|im_start|>[user\nq<|im_end|>\n]<|im_start|>assistant\na<|im_end|>\n[<|im_start|>user")
    );
    let mut pair = fixture("prompt-completion", r#"{"prompt": "tog", "completion": "ether"}"#);
    pair.recipe.chat.train_on_end_of_turn = false;
    assert_eq!(shown(&pair).unwrap(), ["tog[ether]"]);
    pair.recipe.chat.boundary = Boundary::Joined;
    assert_eq!(shown(&pair).unwrap(), ["to[gether]"]);
    // The second start has the tokens from the cache.
    for _ in 0..2 {
        let warnings = pair.open().unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].contains("a prompt ends inside of a token"), "{warnings:?}");
    }
    let untrained = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}<|im_end|>{% endfor %}";
    let mut chat = fixture("messages", rows);
    chat.recipe.chat.chat_template = Some(TemplateChoice(untrained.to_owned()));
    for _ in 0..2 {
        let warnings = chat.open().unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].starts_with("no answer's end-of-turn token is trained"), "{warnings:?}");
    }
}

#[test]
fn what_a_border_swallows_belongs_to_the_answer() {
    let mut pair = fixture("prompt-completion", r#"{"prompt": "tog", "completion": "ether"}"#);
    let question = |pair: &Fixture| pair.open().unwrap().train.question(0).unwrap();
    let asked = |pair: &Fixture| tokenizer().decode(&question(pair).prompt).unwrap() + &question(pair).border;
    assert_eq!((asked(&pair), question(&pair).border), ("tog".into(), String::new()));
    pair.recipe.chat.boundary = Boundary::Joined;
    assert_eq!((asked(&pair), question(&pair).border), ("tog".into(), "g".into()));
    assert_eq!(question(&pair).references, ["ether"]);
}

#[test]
fn a_prompt_that_is_trained_is_one_that_can_be_cut_and_asked() {
    let long = "word ".repeat(30);
    let pair = format!(
        r#"{{"prompt": [{{"role": "user", "content": "{long}"}}], "completion": [{{"role": "assistant", "content": "a"}}]}}"#
    );
    let messages =
        format!(r#"{{"messages": [{{"role": "user", "content": "{long}"}}, {{"role": "assistant", "content": "a"}}]}}"#);
    for (format, row) in [("prompt-completion", pair), ("messages", messages)] {
        let mut chat = fixture(format, &row);
        let asked = |chat: &Fixture| chat.open().unwrap().train.question(0).unwrap().prompt;
        let prompt = asked(&chat);
        assert!(tokenizer().decode_with_special(&prompt).unwrap().ends_with("<|im_start|>assistant\n"));
        chat.recipe.chat.train_on = Some(TrainOn::All);
        assert_eq!(asked(&chat), prompt);
        let chat = chat.limit(40, OnTooLong::Truncate);
        let splits = chat.open().unwrap();
        assert_eq!((splits.files[0].samples.cut, splits.train.lengths()), (1, &[39][..]));
        assert!(asked(&chat).len() < 40 && prompt.starts_with(&asked(&chat)[..9]));
    }
}

#[test]
fn a_text_that_begins_twice_is_told() {
    let mut chat =
        fixture("messages", r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#);
    let model = tempfile::tempdir().unwrap();
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
    for name in ["tokenizer.json", "config.json"] {
        std::fs::copy(fixtures.join(name), model.path().join(name)).unwrap();
    }
    std::fs::write(model.path().join("tokenizer_config.json"), r#"{"bos_token": "<|im_start|>"}"#).unwrap();
    let template = TEMPLATE.replacen("{{ tools", "{{ bos_token }}{{ tools", 1);
    chat.recipe.chat.chat_template = Some(TemplateChoice(template));
    let own = crate::data::Tokenizer::load(model.path()).unwrap();
    for _ in 0..2 {
        let splits = crate::data::open(&chat.request(Some(&own)), &mut |_, _, _| ()).unwrap();
        assert!(splits.warnings[0].starts_with("texts begin with `<|im_start|>` twice"), "{:?}", splits.warnings);
    }
}

#[test]
fn says_what_is_wrong_with_a_row() {
    let error = |format, content: &str| fixture(format, content).error();
    let in_messages = |messages: &str| error("messages", &format!("{{\"messages\": {messages}}}"));
    for (messages, fault) in [
        ("[]", "there is no message"),
        ("\"hi\"", "a list of messages is expected, found a string"),
        (r#"[{"role": "user", "content": "a"}, {"content": "b"}]"#, "message 1 (from 0): `role` is missing"),
        (
            r#"[{"role": "user", "content": 12}]"#,
            "message 0 (from 0): `content` must be a text or a list of parts, found a number",
        ),
        (r#"[{"role": "user", "content": "a", "train": 1}]"#, "message 0 (from 0): `train` must be true or false, found 1"),
        (r#"[{"role": "user", "content": "a", "weight": 0.5}]"#, "message 0 (from 0): `weight` must be 0 or 1, found 0.5"),
        (
            r#"[{"role": "user", "content": "a", "weight": 1, "train": false}]"#,
            "message 0 (from 0): `train` is false, and `weight` 1",
        ),
        ("[1]", "message 0 (from 0): an object with `role` and `content` is expected, found a number"),
        (r#"[{"role": null, "content": "a"}]"#, "message 0 (from 0): `role` must be a text, found null"),
        (r#"[{"role": "user", "content": [1]}]"#, "message 0 (from 0): a part of `content` must be an object, found a number"),
    ] {
        assert_eq!(in_messages(messages), format!("`train.jsonl:1`: field `messages`: {fault}"));
    }
    assert!(
        in_messages(r#"[{"role": "user", "content": "a"}]"#)
            .ends_with("and none to predict: no message of the assistant is trained")
    );
    assert_eq!(error("messages", "{}"), "`train.jsonl:1`: field `messages` is missing");
    let tools = r#"{"messages": [{"role": "user", "content": "a"}], "tools": 3}"#;
    assert_eq!(
        error("messages", tools),
        "`train.jsonl:1`: field `tools`: a list of objects is expected, or its JSON as text, found a number"
    );
    for documents in ["3", "[1]", "\"d\""] {
        let row = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}], "documents": {documents}}}"#);
        let expected = "`train.jsonl:1`: field `documents`: a list of objects is expected, found ";
        assert!(error("messages", &row).starts_with(expected));
    }
}

#[test]
fn says_what_is_wrong_with_turns_and_instructions() {
    let error = |format, content: &str| fixture(format, content).error();
    let turns = |turns: &str| error("sharegpt", &format!("{{\"conversations\": {turns}}}"));
    for (wrong, fault) in [
        (r#""a""#, "expected a list of objects with `from` and `value`, found a string"),
        ("[]", "there is no message"),
        ("[1]", "turn 0 (from 0): an object with `from` and `value` is expected, found a number"),
        (r#"[{"value": "a"}]"#, "turn 0 (from 0): `from` is missing"),
        (r#"[{"from": "human"}]"#, "turn 0 (from 0): `value` is missing"),
        (r#"[{"from": 3, "value": "a"}]"#, "turn 0 (from 0): `from` must be a text, found 3"),
        (r#"[{"from": "human", "value": null}]"#, "turn 0 (from 0): `value` is missing"),
        (
            r#"[{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]"#,
            "turn 1 (from 0): `from` is `bot`, which is none of human, user, gpt",
        ),
        (r#"[{"from": "function_call", "value": "f"}]"#, "the `value` of `function_call` must be JSON in a text, found \"f\""),
        (r#"[{"from": "human", "value": 7}]"#, "message 0 (from 0): `content` must be a text or a list of parts, found a number"),
    ] {
        let error = turns(wrong);
        assert!(error.starts_with("`train.jsonl:1`: field `conversations`: ") && error.contains(fault), "{error}");
    }
    for (row, fault) in [
        (r#"{"instruction": "a"}"#, "field `output` is missing"),
        (r#"{"output": "a"}"#, "field `instruction` is missing"),
        (r#"{"instruction": 1, "output": "b"}"#, "field `instruction`: expected a string, found a number"),
        (r#"{"instruction": "a", "output": null}"#, "field `output`: expected a string, found null"),
        (r#"{"instruction": "a", "output": ["b"]}"#, "field `output`: expected a string, found an array"),
        (r#"{"instruction": "a", "input": 3, "output": "b"}"#, "field `input`: expected a string, found a number"),
        (r#"{"instruction": "a", "system": {}, "output": "b"}"#, "field `system`: expected a string, found an object"),
        (r#"{"instruction": "a", "output": "b", "history": ["a"]}"#, "field `history`: expected a list of pairs"),
        (r#"{"instruction": "a", "output": "b", "history": [["a"]]}"#, "field `history`: expected a list of pairs"),
        (r#"{"instruction": "a", "output": "b", "history": [["a", 1]]}"#, "field `history`: expected a list of pairs"),
    ] {
        let error = error("alpaca", row);
        assert!(error.starts_with("`train.jsonl:1`: ") && error.contains(fault), "{error}");
    }
}

#[test]
fn says_why_a_template_refuses_a_row() {
    let mut refusing = fixture("messages", "{\"messages\": [{\"role\": \"critic\", \"content\": \"a\"}]}");
    refusing.recipe.chat.chat_template = Some(TemplateChoice("{{ raise_exception('no role ' ~ messages[0].role) }}".to_owned()));
    assert_eq!(refusing.error(), "`train.jsonl:1`: the chat template of `data.chat_template`: no role critic");
    refusing.recipe.chat.chat_template = None;
    assert!(refusing.error().starts_with("conversations need a chat template: the model of "));
}
