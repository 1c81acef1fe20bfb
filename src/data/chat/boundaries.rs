//! Where a message stands in the text of its conversation: found by rendering what comes before it, and that with it.
//!
//! An answer that its template writes otherwise once more follows, without its thoughts, with another end of turn, or behind a prompt that has
//! moved, is looked for in the text of all as the model itself writes it, and believed where it is found there as it was.

use std::ops::Range;

use serde_json::Value as Json;

use super::conversation::{Conversation, is_assistant};
use super::marks::OPEN;
use super::template::{ChatTemplate, TemplateFault};
use crate::metrics::is_space;
use crate::units::Fault;

/// The parts of a text that are tokens, in bytes, and whether each is one that was added to the tokenizer, such as what ends a turn.
pub(super) type TokensOf<'a> = &'a dyn Fn(&str) -> Result<Vec<(Range<usize>, bool)>, Fault>;

/// Prompts that make the model think end in this. What follows later is written without it.
const THINK: &str = "<think>";
/// Characters of a text that show what begins it.
const BEGINNING: usize = 256;

/// A conversation's text and its template, which are asked where messages stand.
#[derive(Clone, Copy)]
pub(super) struct Boundaries<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) conversation: &'a Conversation,
    /// All of it, without a generation prompt.
    pub(super) text: &'a str,
}

impl Boundaries<'_> {
    /// In bytes, what the message `index` says: of the assistant what follows the generation prompt, of others with their header.
    pub(super) fn said(&self, index: usize) -> Result<Range<usize>, Fault> {
        self.behind(index, self.rendered(index, is_assistant(&self.conversation.messages[index]))?)
    }

    /// In bytes, the message `index` with its header.
    pub(super) fn whole(&self, index: usize) -> Result<Range<usize>, Fault> {
        // Not every template renders nothing.
        let before = if index == 0 { Some(String::new()) } else { self.rendered(index, false)? };
        self.behind(index, before)
    }

    /// The end of the prompt that the first `count` messages are, with the generation prompt where the assistant is next.
    pub(super) fn prompt(&self, count: usize) -> Result<usize, Fault> {
        let is_next = self.conversation.messages.get(count).is_some_and(is_assistant);
        let prompt = self.rendered(count, is_next)?.ok_or_else(|| self.refuse(count, "the prompt before it does not render"))?;
        if self.text.starts_with(&prompt) {
            Ok(prompt.len())
        } else {
            Err(self.refuse(count, "what follows changes how the prompt is written"))
        }
    }

    /// The message `index` behind the text before it.
    fn behind(&self, index: usize, before: Option<String>) -> Result<Range<usize>, Fault> {
        let with = self.rendered(index + 1, false)?;
        let (Some(before), Some(with)) = (before, with) else {
            return Err(self.refuse(index, "a part of the conversation does not render"));
        };
        if !with.starts_with(&before) {
            return Err(self.refuse(index, "the generation prompt is not a prefix of the conversation with the answer"));
        }
        if !self.text.starts_with(&with) {
            return Err(self.refuse(index, "what follows changes how this message is written"));
        }
        Ok(before.len()..with.len())
    }

    /// The first `count` messages, of all of them the text that is there already; `None` where the template refuses them.
    fn rendered(&self, count: usize, has_prompt: bool) -> Result<Option<String>, Fault> {
        let messages = &self.conversation.messages;
        if count == messages.len() && !has_prompt {
            return Ok(Some(self.text.to_owned()));
        }
        rendered(self.template, self.conversation, count, has_prompt)
    }

    fn refuse(&self, index: usize, why: &str) -> Fault {
        self.template.fault(format!("message {index} (from 0): {why}"))
    }

    /// In bytes, what of the answer `index` stands in the text as the model writes it behind the generation prompt; `None` where nobody can say.
    /// Thoughts may be missing; an end of turn that the model would not write there is none of it.
    pub(super) fn rewritten(&self, index: usize, tokens: TokensOf<'_>) -> Result<Option<Range<usize>>, Fault> {
        let message = &self.conversation.messages[index];
        if !is_assistant(message) {
            return Ok(None);
        }
        let Some((own, at)) = self.answer(index)? else { return Ok(None) };
        let text = &self.text[at..];
        let parts = tokens(&own)?;
        let is_end = |(part, is_added): &&(Range<usize>, bool)| *is_added || is_blank(&own, part);
        let ends: Vec<_> = parts.iter().rev().take_while(is_end).map(|(part, _)| part.clone()).collect();
        let said = &own[..ends.last().map_or(own.len(), |part| part.start)];
        for count in borders(said, text).chain([0]) {
            let same = |end: usize, part: &Range<usize>| {
                own.get(part.clone()).filter(|part| text[end..].starts_with(part)).map(|part| end + part.len()).ok_or(end)
            };
            let (Ok(end) | Err(end)) = ends.iter().rev().try_fold(count, same);
            let is_whole = end - count == own.len() - said.len();
            if !says(&text[..end], message) {
                continue;
            }
            if is_whole || begins_with_end(&text[count..], tokens)? && begins_with_end(&text[end..], tokens)? {
                return Ok(Some(at..at + end));
            }
        }
        Ok(None)
    }

    /// The answer `index` as the model would write it as the last message, without the generation prompt; and where the text of all has it.
    fn answer(&self, index: usize) -> Result<Option<(String, usize)>, Fault> {
        let (Some(prompt), Some(with)) = (self.rendered(index, true)?, self.rendered(index + 1, false)?) else { return Ok(None) };
        if let Some(answer) = behind(&prompt, &with, self.text) {
            return Ok(Some(answer));
        }
        // What comes long before it may be written otherwise, too. What counts is what follows the message before.
        let Some(before) = index.checked_sub(1) else { return Ok(None) };
        let mut conversation = self.conversation.clone();
        let Some(Json::String(content)) = conversation.messages[before].get_mut("content") else { return Ok(None) };
        let end = content.trim_end_matches(is_space).len();
        if end == 0 {
            return Ok(None);
        }
        content.insert_str(end, OPEN);
        let behind_it = |count: usize, has_prompt: bool, plain: &str| {
            let Some(text) = rendered(self.template, &conversation, count, has_prompt)? else { return Ok(None) };
            let parts = text.split_once(OPEN).filter(|(start, rest)| plain == [*start, *rest].concat());
            Ok::<_, Fault>(parts.map(|(start, rest)| (start.len(), rest.to_owned())))
        };
        let found = (
            behind_it(index, true, &prompt)?,
            behind_it(index + 1, false, &with)?,
            behind_it(conversation.messages.len(), false, self.text)?,
        );
        let (Some((_, prompt)), Some((_, with)), Some((start, text))) = found else { return Ok(None) };
        Ok(behind(&prompt, &with, &text).map(|(own, at)| (own, start + at)))
    }
}

fn rendered(
    template: &ChatTemplate,
    conversation: &Conversation,
    count: usize,
    has_prompt: bool,
) -> Result<Option<String>, Fault> {
    match template.render_messages(conversation, &conversation.messages[..count], has_prompt, false) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.payload::<TemplateFault>().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

/// What follows the prompt in the conversation that the answer ends, and where that is in the whole text.
fn behind(prompt: &str, with: &str, text: &str) -> Option<(String, usize)> {
    with.strip_prefix(prompt)?;
    let unthinking = prompt.trim_end().strip_suffix(THINK);
    let same = [Some(prompt), unthinking].into_iter().flatten().find(|same| text.starts_with(same))?;
    Some((with[same.len()..].to_owned(), same.len()))
}

/// Whether a text has a message's answer without thoughts, and the names of its calls, beside which some templates take what is said for a thought.
fn says(text: &str, message: &Json) -> bool {
    let calls = message.get("tool_calls").and_then(Json::as_array).map_or(&[][..], Vec::as_slice);
    let name = |call: &Json| call.get("function").unwrap_or(call).get("name").and_then(Json::as_str).map(str::to_owned);
    let answer = |text: &str| text.rsplit("</think>").next().unwrap_or_default().trim().to_owned();
    let said: Vec<String> = match message.get("content") {
        Some(Json::String(content)) => vec![answer(content)],
        Some(Json::Array(parts)) => parts.iter().filter_map(|part| Some(answer(part.get("text")?.as_str()?))).collect(),
        _ => Vec::new(),
    };
    let has = |said: &String| text.contains(said.as_str());
    calls.iter().all(|call| name(call).is_some_and(|name| has(&name))) && (!calls.is_empty() || said.iter().all(has))
}

fn begins_with_end(text: &str, tokens: TokensOf<'_>) -> Result<bool, Fault> {
    let beginning = &text[..text.char_indices().nth(BEGINNING).map_or(text.len(), |(at, _)| at)];
    let parts = tokens(beginning)?;
    let first = parts.iter().find(|(part, _)| !is_blank(beginning, part));
    Ok(first.map_or(beginning.len() == text.len(), |(_, is_added)| *is_added))
}

fn is_blank(text: &str, part: &Range<usize>) -> bool {
    text.get(part.clone()).is_some_and(|part| part.trim().is_empty())
}

/// The lengths of all ends of `one` with which `other` begins, the longest first, none of them 0.
fn borders(one: &str, other: &str) -> impl Iterator<Item = usize> {
    let (one, other) = (one.as_bytes(), &other.as_bytes()[..other.len().min(one.len())]);
    // Knuth, Morris and Pratt: of each beginning of `other` the longest end that begins `other`, too.
    let mut next = vec![0; other.len()];
    let advance = |next: &[usize], mut count: usize, byte: u8| loop {
        match (other.get(count) == Some(&byte), count) {
            (true, _) => break count + 1,
            (false, 0) => break 0,
            (false, _) => count = next[count - 1],
        }
    };
    for at in 1..other.len() {
        next[at] = advance(&next, next[at - 1], other[at]);
    }
    let longest = one.iter().fold(0, |count, &byte| advance(&next, count, byte));
    std::iter::successors(Some(longest), move |&count| Some(next[count.checked_sub(1)?])).take_while(|&count| count > 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::conversation::{Conversation, tools_of};
    use super::super::spans::{ChatSample, text_and_spans};
    use super::super::template::ChatTemplate;
    use super::super::template_tests::template;
    use super::*;
    use crate::recipe::TrainOn;

    const ADDED: [&str; 22] = [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|start|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|channel|>",
        "<|message|>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "<|user|>",
        "<|assistant|>",
    ];

    /// Tokens of one character, but for the added ones.
    fn tokens(text: &str) -> Vec<(Range<usize>, bool)> {
        let mut parts = Vec::new();
        let mut at = 0;
        while let Some(first) = text[at..].chars().next() {
            let added = ADDED.iter().find(|added| text[at..].starts_with(**added));
            let end = at + added.map_or(first.len_utf8(), |added| added.len());
            parts.push((at..end, added.is_some()));
            at = end;
        }
        parts
    }

    fn trained(template: &ChatTemplate, conversation: &Conversation, knows_added: bool) -> Result<Vec<String>, String> {
        let sample = ChatSample { conversation: conversation.clone(), ..ChatSample::default() };
        let tokens = |text: &str| Ok(tokens(text).into_iter().map(|(part, is_added)| (part, is_added && knows_added)).collect());
        let spanned = text_and_spans(template, &sample, TrainOn::Assistant, &tokens).map_err(|error| error.to_string())?;
        let spans = spanned.spans.into_iter().filter(|span| !span.is_empty());
        Ok(spans.map(|span| spanned.text[span].to_owned()).collect())
    }

    /// Each family's template, and what a tagged one that renders the same text in Transformers 5.3.0 says that the model writes: all but
    /// ends of turns that it would not write, and that of an answer of which nothing else is left.
    #[test]
    fn all_answers_are_found_in_templates_that_write_earlier_ones_otherwise() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat/rewritten.json");
        let fixture: Json = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let now = chrono::NaiveDate::from_ymd_opt(2026, 11, 22).unwrap().and_hms_opt(14, 5, 9);
        let mut refused = Vec::new();
        for case in fixture["trained"].as_array().unwrap() {
            let [family, name] = [0, 1].map(|at| case[at].as_str().unwrap());
            let of = &fixture["templates"][family];
            let special = of["tokens"].as_object().unwrap().iter();
            let special = special.map(|(name, token)| (name.clone(), token.as_str().unwrap().to_owned())).collect();
            let template = ChatTemplate::new(of["template"].as_str().unwrap(), special, family.to_owned(), now);
            let conversation = &fixture["conversations"][name];
            let tools = tools_of(conversation["tools"].clone()).unwrap();
            let conversation = Conversation { tools, ..Conversation::of(conversation["messages"].clone()).unwrap() };
            match trained(&template, &conversation, true) {
                Ok(found) => assert_eq!(json!(found), case[2], "{family}, {name}"),
                Err(error) => refused.push(format!("{family}, {name}: {}", error.rsplit(": ").next().unwrap_or_default())),
            }
            // Who knows no added tokens refuses more, and finds nothing else, but for that end of turn.
            if let Ok(found) = trained(&template, &conversation, false) {
                assert!(json!(found) == case[2] || name == "no-content", "{family}, {name}: {found:?}");
            }
        }
        // The template leaves the calls out.
        let why = "what follows changes how this message is written";
        assert_eq!(
            refused,
            ["tools", "calls and thoughts", "content beside a call"].map(|name| format!("olmo-2, {name}: {why}"))
        );
    }

    #[test]
    fn what_is_not_the_answer_as_the_model_writes_it_is_refused() {
        let chat = |answer: &str| {
            let messages = json!([{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer},
                {"role": "user", "content": "R"}, {"role": "assistant", "content": "last"}]);
            Conversation::of(messages).unwrap()
        };
        let written = |earlier: &str, answer: &str| {
            let source = format!(
                "{{% for m in messages %}}<s>{{{{ m.role }}}}:{{% if m.role == 'user' or loop.last %}}{{{{ m.content }}}}</s>{{% else %}}{earlier}{{% endif %}}\
                 {{% endfor %}}{{% if add_generation_prompt %}}<s>assistant:{{% endif %}}"
            );
            trained(&template(&source).unwrap(), &chat(answer), true)
        };
        let thoughts = "{{ m.content.split('</think>')[-1] }}</s>";
        assert_eq!(written(thoughts, "<think>a b</think>b").unwrap(), ["b</s>", "last</s>"]);
        assert_eq!(written("{{ m.content }}<|end|>", "a").unwrap(), ["a", "last</s>"]);
        for (earlier, answer) in [
            ("{{ m.content[:3] }}</s>", "a b c d"),
            ("{{ m.content[-3:] }}</s>", "a b c d"),
            ("{{ m.content | upper }}</s>", "a b"),
            ("…</s>", "a b"),
            ("{{ m.content }} (cut)<|end|>", "a b"),
            ("{{ m.content }}|{{ m.content }}<|end|>", "a b"),
        ] {
            let error = written(earlier, answer).unwrap_err();
            assert!(
                error.ends_with("message 1 (from 0): what follows changes how this message is written"),
                "{earlier}: {error}"
            );
        }
    }

    #[test]
    fn borders_are_ends_that_begin_another_text() {
        let of = |one: &str, other: &str| borders(one, other).collect::<Vec<_>>();
        assert_eq!(of("xabab", "ababc"), [4, 2]);
        assert_eq!(of("aaa", "aaaa"), [3, 2, 1]);
        assert_eq!(of("ab", "b"), [1]);
        assert_eq!((of("ab", "a"), of("", "a"), of("a", "")), (vec![], vec![], vec![]));
    }
}
