//! Which part of a conversation's text is trained: what the template's own tags say, or else where messages stand.

use std::ops::Range;

use super::boundaries::{Boundaries, TokensOf};
use super::conversation::{Conversation, is_assistant};
use super::template::ChatTemplate;
use crate::recipe::TrainOn;
use crate::units::Fault;

#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::data) struct ChatSample {
    pub(in crate::data) conversation: Conversation,
    /// Whether each message is trained, where the row says so.
    pub(in crate::data) trains: Vec<Option<bool>>,
    /// So many first messages are the prompt, where the row has one.
    pub(in crate::data) prompt: Option<usize>,
}

pub(super) struct SpannedText {
    pub(super) text: String,
    /// What is trained, in order and apart.
    pub(super) spans: Vec<Range<usize>>,
    /// Where the prompt ends, in bytes, where that is trained, too: else all that leads to the first span is the prompt.
    pub(super) prompt: Option<usize>,
    pub(super) is_rewritten: bool,
}

pub(super) fn text_and_spans(
    template: &ChatTemplate,
    sample: &ChatSample,
    train_on: TrainOn,
    tokens: TokensOf<'_>,
) -> Result<SpannedText, Fault> {
    let conversation = &sample.conversation;
    let wanted = matches!(train_on, TrainOn::Assistant | TrainOn::Last).then(|| sample.wanted(train_on));
    let is_tagged = || sample.flagged(true).all(|index| is_assistant(&conversation.messages[index]));
    if let Some(wanted) = &wanted
        && template.has_generation()?
        && is_tagged()
    {
        let (text, spans) = template.render_with_spans(conversation)?;
        let boundaries = Boundaries { template, conversation, text: &text };
        let spans = of_messages(&boundaries, spans, wanted)?;
        return Ok(SpannedText { text, spans, prompt: None, is_rewritten: false });
    }
    let text = template.render(conversation, false)?;
    let boundaries = Boundaries { template, conversation, text: &text };
    if let Some(wanted) = wanted {
        let mut is_rewritten = false;
        let mut span = |index| {
            boundaries.said(index).or_else(|error| {
                is_rewritten = true;
                boundaries.rewritten(index, tokens)?.ok_or(error)
            })
        };
        let spans = wanted.into_iter().map(&mut span).collect::<Result<_, _>>()?;
        return Ok(SpannedText { text, spans, prompt: None, is_rewritten });
    }
    let (start, prompt) = match (sample.prompt, train_on) {
        (Some(count), TrainOn::Completion) => (boundaries.prompt(count)?, None),
        // Where the prompt ends decides what may be cut and asked. Nobody can say it of some templates: then nothing may.
        (count, _) => {
            let first = || conversation.messages.iter().position(is_assistant);
            (0, count.or_else(first).and_then(|count| boundaries.prompt(count).ok()))
        }
    };
    let all = start..text.len();
    let mut spans = vec![all];
    for index in sample.flagged(false) {
        spans = without(spans, &boundaries.whole(index)?);
    }
    Ok(SpannedText { text, spans, prompt, is_rewritten: false })
}

impl ChatSample {
    /// The messages to train, where it is messages that are trained.
    fn wanted(&self, train_on: TrainOn) -> Vec<usize> {
        let messages = &self.conversation.messages;
        let last = messages.iter().rposition(is_assistant);
        let counts = |index: usize| is_assistant(&messages[index]) && (train_on == TrainOn::Assistant || Some(index) == last);
        let first = self.prompt.unwrap_or(0);
        let flag = |index: usize| self.trains.get(index).copied().flatten();
        (first..messages.len()).filter(|&index| flag(index).unwrap_or_else(|| counts(index))).collect()
    }

    fn flagged(&self, wanted: bool) -> impl Iterator<Item = usize> + '_ {
        self.trains.iter().enumerate().filter(move |(_, flag)| **flag == Some(wanted)).map(|(index, _)| index)
    }
}

/// The template's own spans that lie in the wanted messages.
fn of_messages(boundaries: &Boundaries<'_>, spans: Vec<Range<usize>>, wanted: &[usize]) -> Result<Vec<Range<usize>>, Fault> {
    let messages = &boundaries.conversation.messages;
    let assistants: Vec<usize> = (0..messages.len()).filter(|&index| is_assistant(&messages[index])).collect();
    if wanted == assistants {
        return Ok(spans);
    }
    let regions = wanted.iter().map(|&index| boundaries.whole(index)).collect::<Result<Vec<_>, _>>();
    match regions {
        Ok(regions) => {
            let parts = |span: &Range<usize>| regions.iter().map(|region| overlap(span, region)).collect::<Vec<_>>();
            Ok(spans.iter().flat_map(parts).filter(|part| !part.is_empty()).collect())
        }
        // One span for each answer: which is whose needs no borders.
        Err(_) if spans.len() == assistants.len() => {
            Ok(spans.into_iter().zip(&assistants).filter(|(_, index)| wanted.contains(index)).map(|(span, _)| span).collect())
        }
        Err(error) => Err(error),
    }
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let start = one.start.max(other.start);
    start..one.end.min(other.end).max(start)
}

fn without(spans: Vec<Range<usize>>, hole: &Range<usize>) -> Vec<Range<usize>> {
    let parts = |span: Range<usize>| [span.start..span.end.min(hole.start), span.start.max(hole.end)..span.end];
    spans.into_iter().flat_map(parts).filter(|part| part.start < part.end).collect()
}

/// Whether each token, given as the part of the text that it stands for, is trained: it is where it overlaps a span.
pub(super) fn mask(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    let is_trained = |&(start, end): &(usize, usize)| {
        let next = spans.partition_point(|span| span.end <= start);
        // A token of no text belongs to what it stands in.
        spans.get(next).is_some_and(|span| span.start < end.max(start + 1))
    };
    offsets.iter().map(is_trained).collect()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use serde_json::{Value, json};

    use super::super::template_tests::template;
    use super::*;

    const CHATML: &str = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '|' }}{% endfor %}\
        {% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";
    const TAGGED: &str = "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
        {% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '|' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";

    fn sample(roles: &str) -> ChatSample {
        let role = |letter: char| match letter.to_ascii_lowercase() {
            'u' => "user",
            'a' => "assistant",
            _ => "system",
        };
        let messages: Vec<Value> =
            roles.chars().enumerate().map(|(i, c)| json!({"role": role(c), "content": format!("{c}{i}é")})).collect();
        ChatSample { conversation: Conversation { messages, ..Conversation::default() }, ..ChatSample::default() }
    }

    fn trained(source: &str, sample: &ChatSample, train_on: TrainOn) -> Result<Vec<String>, String> {
        let SpannedText { text, spans, .. } = text_and_spans(&template(source).unwrap(), sample, train_on, &|_| Ok(Vec::new()))
            .map_err(|error| error.to_string())?;
        Ok(spans.into_iter().map(|span| text[span].to_owned()).collect())
    }

    #[test]
    fn messages_are_found_by_tags_and_by_borders() {
        use TrainOn::{All, Assistant, Completion, Last};
        let chat = sample("suaua");
        assert_eq!(trained(CHATML, &chat, Assistant).unwrap(), ["a2é|", "a4é|"]);
        assert_eq!(trained(TAGGED, &chat, Assistant).unwrap(), ["a2é", "a4é"]);
        assert_eq!(trained(CHATML, &chat, Last).unwrap(), ["a4é|"]);
        assert_eq!(trained(TAGGED, &chat, Last).unwrap(), ["a4é"]);
        assert_eq!(trained(CHATML, &sample("ua"), All).unwrap(), ["<user>u0é|<assistant>a1é|"]);
        // A completion is what follows the prompt, and an answer in the prompt is none.
        let completed = ChatSample { prompt: Some(3), ..sample("uauau") };
        assert_eq!(trained(CHATML, &completed, Completion).unwrap(), ["a3é|<user>u4é|"]);
        assert_eq!(trained(CHATML, &completed, Assistant).unwrap(), ["a3é|"]);
        assert_eq!(trained(TAGGED, &completed, Assistant).unwrap(), ["a3é"]);
        assert_eq!(trained(CHATML, &sample("uu"), Assistant).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_row_says_which_messages_are_trained() {
        use TrainOn::{All, Assistant, Last};
        let flagged = |index: usize, flag: bool| {
            let mut chat = sample("uaua");
            chat.trains = vec![None; 4];
            chat.trains[index] = Some(flag);
            chat
        };
        assert_eq!(trained(CHATML, &flagged(1, false), Assistant).unwrap(), ["a3é|"]);
        assert_eq!(trained(TAGGED, &flagged(1, false), Assistant).unwrap(), ["a3é"]);
        assert_eq!(trained(TAGGED, &flagged(1, true), Last).unwrap(), ["a1é", "a3é"]);
        assert_eq!(trained(CHATML, &flagged(2, true), Assistant).unwrap(), ["a1é|", "<user>u2é|", "a3é|"]);
        assert_eq!(trained(TAGGED, &flagged(2, true), Last).unwrap(), ["<user>u2é|", "a3é|"]);
        assert_eq!(trained(CHATML, &flagged(2, false), All).unwrap(), ["<user>u0é|<assistant>a1é|", "<assistant>a3é|"]);
    }

    #[test]
    fn what_is_ambiguous_is_refused_with_the_message() {
        let rewrites = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '…' }}|{% endfor %}";
        let error = trained(rewrites, &sample("uaua"), TrainOn::Assistant).unwrap_err();
        assert!(error.ends_with("message 1 (from 0): what follows changes how this message is written"), "{error}");
        assert_eq!(trained(rewrites, &sample("uaua"), TrainOn::Last).unwrap(), ["a3é|"]);
        let error = trained(
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}",
            &sample("ua"),
            TrainOn::Assistant,
        )
        .unwrap_err();
        assert!(error.ends_with("the generation prompt is not a prefix of the conversation with the answer"), "{error}");
        let error = trained(
            "{{ raise_exception('no') if messages|length < 2 }}{% for m in messages %}{{ m.content }}{% endfor %}",
            &sample("ua"),
            TrainOn::Assistant,
        )
        .unwrap_err();
        assert!(error.ends_with("message 1 (from 0): a part of the conversation does not render"), "{error}");
        // With as many spans as answers the tags tell which is whose.
        let tagged = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}\
            {{ loop.last }}{% endif %}{% endfor %}{{ messages|length }}";
        assert_eq!(trained(tagged, &sample("uaua"), TrainOn::Last).unwrap(), ["a3é"]);
    }

    #[test]
    fn a_token_is_trained_where_it_overlaps() {
        let offsets = [(0, 1), (1, 4), (1, 4), (4, 4), (4, 6), (6, 8)];
        assert_eq!(mask(&offsets, &[2..3, 6..7]), [false, true, true, false, false, true]);
        assert_eq!(mask(&offsets, &[4..5]), [false, false, false, true, true, false]);
        assert_eq!(mask(&offsets, &[]), [false; 6]);
    }
}
