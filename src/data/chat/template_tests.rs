//! Small templates, and what Transformers makes of them.

use serde_json::{Value as Json, json};

use super::conversation::Conversation;
use super::marks::{CLOSE, OPEN};
use super::template::ChatTemplate;
use crate::units::Fault;

/// A template from its text, with `</s>` as `eos_token`, at a time of its own.
pub(super) fn template(source: &str) -> Result<ChatTemplate, Fault> {
    let now = chrono::NaiveDate::from_ymd_opt(2026, 11, 22).unwrap().and_hms_opt(14, 5, 9);
    let template = ChatTemplate::new(source, vec![("eos_token".to_owned(), "</s>".to_owned())], "t.jinja".to_owned(), now);
    template.has_generation()?;
    Ok(template)
}

/// What a template without messages makes.
pub(super) fn rendered(source: &str) -> Result<String, String> {
    template(source).and_then(|template| template.render(&Conversation::default(), false)).map_err(|error| error.to_string())
}

#[allow(clippy::needless_pass_by_value)]
fn conversation(messages: Json) -> Conversation {
    Conversation { messages: messages.as_array().unwrap().clone(), ..Conversation::default() }
}

#[test]
fn arguments_are_objects_unless_the_template_joins_them_to_text() {
    let call = json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\":1}"}}]}]);
    let conversation = Conversation::of(call).unwrap();
    let of = |arguments: &str| {
        let source = format!("{{% set f = messages[0].tool_calls[0].function %}}{{{{ {arguments} }}}}");
        template(&source).unwrap().render(&conversation, false)
    };
    assert_eq!(of("f.arguments | tojson").unwrap(), "{\"a\": 1}");
    assert_eq!(of("'<' + f.arguments + '>'").unwrap(), "<{\"a\":1}>");
    let empty = json!([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]}]);
    let joins = template("{{ '<' + messages[0].tool_calls[0].arguments + '>' }}").unwrap();
    assert_eq!(joins.render(&Conversation::of(empty).unwrap(), false).unwrap(), "<>");
    assert!(of("raise_exception('no')").unwrap_err().to_string().ends_with("no"));
}

#[test]
fn a_conversation_becomes_text_as_in_transformers() {
    let source = "{%- for message in messages %}\r\n{{- '<' + message['role'].upper() + '>' + message.content.strip() + eos_token }}\
        {%- endfor %}{%- if add_generation_prompt %}{{ '<ASSISTANT>' }}{% endif %}\n";
    let mut conversation =
        conversation(json!([{"role": "system", "content": " Be <brief>.\n"}, {"role": "user", "content": "Hi"}]));
    let text = template(source).unwrap().render(&conversation, true).unwrap();
    assert_eq!(text, "<SYSTEM>Be <brief>.</s><USER>Hi</s><ASSISTANT>");
    // The caller's variables win over those of the tokenizer.
    conversation.variables.insert("eos_token".to_owned(), json!("|"));
    assert_eq!(template(source).unwrap().render(&conversation, false).unwrap(), "<SYSTEM>Be <brief>.|<USER>Hi|");
    assert_eq!(rendered("{{ strftime_now('%-d %b %Y, %H:%M') }}").unwrap(), "22 Nov 2026, 14:05");
}

#[test]
fn json_is_written_as_python_writes_it() {
    let mut conversation = Conversation::default();
    conversation
        .variables
        .insert("d".to_owned(), json!({"b": [1, 2.0, "é<&>'\""], "a": {}, "big": u64::MAX, "t": true, "n": null}));
    let text = |source: &str| template(source).unwrap().render(&conversation, false).unwrap();
    assert_eq!(
        text("{{ d | tojson }}"),
        r#"{"b": [1, 2.0, "é<&>'\""], "a": {}, "big": 18446744073709551615, "t": true, "n": null}"#
    );
    assert_eq!(text("{{ d.b | tojson(separators=(',', ':')) }}"), r#"[1,2.0,"é<&>'\""]"#);
    assert_eq!(text("{{ d.b | tojson(indent=1, ensure_ascii=true) }}"), "[\n 1,\n 2.0,\n \"\\u00e9<&>'\\\"\"\n]");
    assert_eq!(
        text("{{ {'b': 1e-7, 'a': (1, '\\n\\x7f🍐')} | tojson(sort_keys=true) }}"),
        "{\"a\": [1, \"\\n\u{7f}🍐\"], \"b\": 1e-07}"
    );
    assert_eq!(text("{{ {1: true, none: []} | tojson(indent='\\t') }}"), "{\n\t\"1\": true,\n\t\"null\": []\n}");
}

#[test]
fn what_the_template_refuses_and_what_can_not_be_done_is_said() {
    let error = rendered("{{ raise_exception('no role ' ~ 1) }}").unwrap_err();
    assert_eq!(error, "the chat template of `t.jinja`: no role 1");
    let refused = [
        ("{% macro m() %}{{ varargs }}{% endmacro %}{{ m(1) }}", "`varargs`, which is not supported"),
        ("{{ nope.x }}", "undefined"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "fuel"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for i in range(99) %}{{ 'x' * 1000000 }}{% endfor %}", "64 MiB"),
        ("{% include 'x' %}", "x"),
        ("{% nosuch %}", "nosuch"),
        ("{{ 'a' | nosuch }}", "nosuch"),
        ("{{ 'a'.append(1) }}", "append"),
    ];
    for (source, why) in refused {
        let error = rendered(source).unwrap_err();
        assert!(error.starts_with("the chat template of `t.jinja`: ") && error.contains(why), "{source}: {error}");
    }
}

#[test]
fn the_assistants_text_is_found() {
    let spans = |source: &str, messages: Json| template(source).and_then(|t| t.render_with_spans(&conversation(messages)));
    let source = "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}\
        {% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let messages = json!([{"role": "user", "content": "é\u{fdd0}"}, {"role": "assistant", "content": "🍐"}]);
    assert_eq!(spans(source, messages).unwrap(), ("ué\u{fdd0}a🍐</s>".to_owned(), vec![7..15]));
    let none = || json!([]);
    assert_eq!(spans("{% generation %}a{% endgeneration %}y", none()).unwrap().1, [0..1]);
    let captured = "x{% set q %}12{% generation %}ab{% endgeneration %}{% endset %}yy{{ q }}";
    assert_eq!(spans(captured, none()).unwrap(), ("xyy12ab".to_owned(), vec![5..7]));
    let scoped = "{% set ns = namespace(a=1) %}{% set b = 1 %}{% generation %}{% set ns.a = 2 %}{% set b = 2 %}{% endgeneration %}{{ ns.a }}{{ b }}";
    assert_eq!(spans(scoped, none()).unwrap(), ("21".to_owned(), vec![]));
    // A caller's variable of the name sets no marks, and takes none away.
    let variables = json!({"__is_marked": true}).as_object().unwrap().clone();
    let own = Conversation { variables, ..conversation(json!([{"role": "assistant", "content": "b"}])) };
    let template_of = template(source).unwrap();
    assert_eq!(template_of.render(&own, false).unwrap(), "ab</s>");
    assert_eq!(template_of.render_with_spans(&own).unwrap().1, [1..6]);
    // What has the marks itself is not taken for what they show.
    let marks = json!([{"role": "user", "content": format!("{OPEN}a{CLOSE}")}, {"role": "assistant", "content": "b"}]);
    assert!(spans(source, marks).unwrap_err().to_string().contains("U+FDD0"));
    for changed in [
        "{% set q %}{% generation %} a {% endgeneration %}{% endset %}{{ q | trim }}",
        "{% set q %}{% generation %}abc{% endgeneration %}{% endset %}{{ q[:2] }}",
    ] {
        assert!(spans(changed, none()).unwrap_err().to_string().contains("changes text around its generation tags"));
    }
}

/// Templates and what Transformers 5.3.0 makes of them: the text, with the assistant's spans in characters, or the error, which is
/// the template's own where it raises one.
#[test]
fn small_templates_are_rendered_as_by_transformers() {
    let of = |name: &str| {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat").join(name);
        std::fs::read_to_string(path).unwrap()
    };
    let mut variables: serde_json::Map<String, Json> = serde_json::from_str(&of("variables.json")).unwrap();
    let messages = variables.remove("messages").unwrap();
    let conversation = Conversation { variables, ..conversation(messages) };
    for row in of("templates.jsonl").lines() {
        let row: Json = serde_json::from_str(row).unwrap();
        let now = chrono::NaiveDate::from_ymd_opt(2026, 11, 22).unwrap().and_hms_opt(14, 5, 9);
        let template = ChatTemplate::new(row["template"].as_str().unwrap(), Vec::new(), "t".to_owned(), now);
        let got = template.has_generation().and_then(|has_generation| match row.get("spans") {
            None => Ok((template.render(&conversation, true)?, Json::Null)),
            Some(_) if !has_generation => Ok((template.render(&conversation, true)?, json!([]))),
            Some(_) => {
                let (text, spans) = template.render_with_spans(&conversation)?;
                let spans = spans.iter().map(|span| [span.start, span.end].map(|at| text[..at].chars().count()));
                let spans = json!(spans.collect::<Vec<_>>());
                Ok((text, spans))
            }
        });
        match (&got, row["error"].as_str()) {
            (Ok((text, spans)), None) => assert_eq!((&json!(text), spans), (&row["text"], &row["spans"]), "{row}"),
            (Err(_), Some(kind)) if kind.ends_with("Error") => {}
            (Err(error), Some(raised)) => assert!(error.to_string().ends_with(&format!(": {raised}")), "{row}: {error}"),
            _ => panic!("{row}: {got:?}"),
        }
    }
}

#[test]
fn the_last_message_can_be_continued() {
    let ends = |source: &str, content: Json| {
        let conversation = conversation(json!([{"role": "user", "content": content}]));
        template(source).unwrap().render_to_continue(&conversation)
    };
    let each = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    assert_eq!(ends(each, json!("It is ")).unwrap(), "<It is ");
    assert_eq!(ends("{{ messages[0].content | trim }}</s>", json!("It is ")).unwrap(), "It is");
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    assert_eq!(ends("{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}", parts).unwrap(), "<a><b");
    assert!(ends("nothing", json!("It is")).is_err());
    assert!(ends(each, json!(null)).is_err());
}
