//! `/v1/completions` and `/v1/chat/completions`: what is asked, and the choices of the reply.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::ApiError;
use super::app_state::AppState;
use super::fields::MAX_COUNT;
use super::job::{PromptTexts, gather};
use super::reply::{ReplyHead, stream};
use super::tokens::PromptEncoder;
use crate::generation::{Finish, LikelihoodsOf, TokenLikelihood, WholeText};

/// New tokens where nobody says how many, as OpenAI has it.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Prompts as texts or tokens, continued; with `echo` and `logprobs`, the likelihoods that harnesses read.
pub(super) async fn completions(State(served): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (mut fields, permit) = served.fields(request).await?;
    served.check_model(&mut fields)?;
    let prompt = fields.take("prompt").ok_or_else(|| ApiError::field("prompt", "`prompt` is missing"))?;
    let adds_special = fields.flag("add_special_tokens", true)?;
    let samples = fields.count("n", 1..=MAX_COUNT)?.unwrap_or(1);
    let (echo, streams) = (fields.flag("echo", false)?, fields.flag("stream", false)?);
    let count = fields.count("logprobs", 0..=MAX_COUNT)?;
    let of_prompt = fields.count("prompt_logprobs", 0..=MAX_COUNT)?;
    let tells_usage = fields.tells_usage()?;
    let scores_alone = echo && fields.wants_no_tokens();
    if streams && (echo || count.is_some() || of_prompt.is_some()) {
        return Err(ApiError::field("stream", "`stream` goes with none of `echo`, `logprobs` and `prompt_logprobs`"));
    }
    let mut rules = fields.rules(&served.rules)?;
    rules.usual_new_tokens = Some(DEFAULT_MAX_TOKENS);
    let read = move |encoder: &PromptEncoder| {
        let prompts = encoder.prompts(&prompt, adds_special)?;
        Ok((echo.then(|| encoder.echoed(&prompt, &prompts)), prompts))
    };
    let (echoed, prompts) = served.apart(Some(permit), read).await?;
    let likelihoods = LikelihoodsOf { new_tokens: count, prompt: of_prompt.max(count.filter(|_| echo)) };
    let answers = served.ask(&prompts, &rules, samples, likelihoods)?;
    let head = ReplyHead::new(false, &served.options.name);
    if streams {
        let prompt_tokens = tells_usage.then(|| prompts.iter().map(Vec::len).sum());
        return Ok(stream(&served, head, answers, prompt_tokens));
    }
    let mut all = served.in_time(gather(answers)).await?;
    if scores_alone {
        let new = all.iter_mut().flat_map(|prompt| &mut prompt.texts);
        new.for_each(|text| *text = WholeText { reason: Some(Finish::Length), evicted: text.evicted, ..WholeText::default() });
    }
    let work =
        move |encoder: &PromptEncoder| Ok((choices(encoder, &prompts, &all, echoed.as_deref(), count, of_prompt), prompts, all));
    let (choices, prompts, all) = served.apart(None, work).await?;
    Ok(Json(head.whole(&choices, &prompts, &all, &served.options.cache)).into_response())
}

/// One for each text of each prompt; `count` and `of_prompt` are of the likelihoods that are asked for.
fn choices(
    encoder: &PromptEncoder,
    prompts: &[Vec<u32>],
    all: &[PromptTexts],
    echoed: Option<&[String]>,
    count: Option<usize>,
    of_prompt: Option<usize>,
) -> Vec<Value> {
    let mut choices = Vec::new();
    for (index, (ids, texts)) in prompts.iter().zip(all).enumerate() {
        let (echoed, prompt_ids) = echoed.map_or(("", &[][..]), |all| (&all[index][..], &ids[..]));
        for text in &texts.texts {
            let written = format!("{echoed}{}", text.text);
            let mut choice = json!({
                "index": choices.len(), "text": written, "token_ids": text.ids,
                "finish_reason": text.reason.map(Finish::name), "logprobs": null,
            });
            if let Some(count) = count {
                choice["logprobs"] = likelihoods_of(encoder, prompt_ids, &texts.likelihoods, text, &written, count);
            }
            if let Some(count) = of_prompt {
                choice["prompt_logprobs"] = of_prompt_tokens(encoder, texts, count);
            }
            choices.push(choice);
        }
    }
    choices
}

/// `prompt_logprobs` of a choice, as vLLM has it: by the ids of the tokens; the first token of the prompt has none.
fn of_prompt_tokens(encoder: &PromptEncoder, texts: &PromptTexts, count: usize) -> Value {
    let one = |likelihood: &TokenLikelihood| {
        let own = (likelihood.id, likelihood.log_probability);
        let all = likelihood.most_likely.iter().take(count).copied().chain([own]);
        let entry = |(id, value): (u32, f32)| (id.to_string(), json!({ "logprob": value, "decoded_token": encoder.token(id) }));
        Value::Object(all.map(entry).collect())
    };
    std::iter::once(Value::Null).chain(texts.likelihoods.iter().map(one)).collect()
}

/// `logprobs` of a choice, whose text is `written`: an entry for each token of `prompt_ids`, of which the first has no likelihood.
fn likelihoods_of(
    encoder: &PromptEncoder,
    prompt_ids: &[u32],
    prompt_likelihoods: &[TokenLikelihood],
    text: &WholeText,
    written: &str,
    count: usize,
) -> Value {
    let (mut tokens, mut values, mut most_likely, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // The bytes of a character whose others follow.
    let (mut offset, mut open, mut rest) = (0, Vec::new(), written.chars());
    let mut add = |id: u32, likelihood: Option<&TokenLikelihood>| {
        let (token, before) = (encoder.token(id), offset);
        let mut bytes = encoder.bytes(id).unwrap_or_else(|| token.clone().into_bytes());
        if !rest.as_str().starts_with(&token) && encoder.is_left_out(id) {
            bytes.clear();
        } else if offset == 0 && bytes.first() == Some(&b' ') && !written.starts_with(' ') {
            // Some decoders take the first space away.
            bytes.remove(0);
        }
        // All parts of a character stand where it begins; what is broken off shows as one, too.
        let goes_on = bytes.first().is_some_and(|byte| byte & 0xc0 == 0x80);
        offsets.push(offset + usize::from(!open.is_empty() && !goes_on));
        let all = [std::mem::take(&mut open), bytes].concat();
        for part in all.utf8_chunks() {
            offset += usize::from(!std::mem::take(&mut open).is_empty()) + part.valid().chars().count();
            match std::str::from_utf8(part.invalid()) {
                Err(error) if error.error_len().is_none() => open = part.invalid().to_vec(),
                broken => offset += usize::from(broken.is_err()),
            }
        }
        rest.by_ref().take(offset - before).for_each(drop);
        tokens.push(token);
        values.push(likelihood.map(|own| own.log_probability));
        most_likely.push(likelihood.map(|own| Value::Object(encoder.most_likely(own, count))));
    };
    let likelihoods = std::iter::once(None).chain(prompt_likelihoods.iter().map(Some));
    prompt_ids.iter().zip(likelihoods).for_each(|(&id, likelihood)| add(id, likelihood));
    text.likelihoods.iter().for_each(|likelihood| add(likelihood.id, Some(likelihood)));
    json!({ "tokens": tokens, "token_logprobs": values, "top_logprobs": most_likely, "text_offset": offsets })
}

/// A conversation by the model's chat template, and the assistant's next message.
pub(super) async fn chat_completions(State(served): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (mut fields, permit) = served.fields(request).await?;
    served.check_model(&mut fields)?;
    let (mut fields, prompt) = served
        .apart(Some(permit), move |encoder| {
            let prompt = encoder.conversation(&mut fields)?;
            Ok((fields, prompt))
        })
        .await?;
    let prompts = vec![prompt];
    let samples = fields.count("n", 1..=MAX_COUNT)?.unwrap_or(1);
    let streams = fields.flag("stream", false)?;
    let is_told = fields.flag("logprobs", false)?;
    let count = fields.count("top_logprobs", 0..=MAX_COUNT)?;
    if count.is_some_and(|count| count > 0) && !is_told {
        return Err(ApiError::field("top_logprobs", "`top_logprobs` needs `logprobs: true`"));
    }
    if streams && is_told {
        return Err(ApiError::field("stream", "`stream` does not go with `logprobs`"));
    }
    let tells_usage = fields.tells_usage()?;
    let mut rules = fields.rules(&served.rules)?;
    served.let_end_by_itself(&mut rules, prompts[0].len());
    let new_tokens = is_told.then(|| count.unwrap_or(0));
    let likelihoods = LikelihoodsOf { new_tokens, prompt: None };
    let answers = served.ask(&prompts, &rules, samples, likelihoods).map_err(|error| error.about("messages"))?;
    let head = ReplyHead::new(true, &served.options.name);
    if streams {
        return Ok(stream(&served, head, answers, tells_usage.then(|| prompts[0].len())));
    }
    let all = served.in_time(gather(answers)).await?;
    let work = move |encoder: &PromptEncoder| Ok((chat_choices(encoder, &all[0].texts, new_tokens), all));
    let (choices, all) = served.apart(None, work).await?;
    Ok(Json(head.whole(&choices, &prompts, &all, &served.options.cache)).into_response())
}

/// One for each text; with likelihoods, where a client asks for them, and so many of the most likely tokens.
fn chat_choices(encoder: &PromptEncoder, texts: &[WholeText], likelihoods: Option<usize>) -> Vec<Value> {
    let choice = |(index, text): (usize, &WholeText)| {
        let told = likelihoods.map(|count| {
            let content: Vec<Value> = text.likelihoods.iter().map(|own| of_token(encoder, own, count)).collect();
            json!({ "content": content })
        });
        json!({
            "index": index, "message": { "role": "assistant", "content": text.text },
            "finish_reason": text.reason.map(Finish::name), "logprobs": told,
        })
    };
    texts.iter().enumerate().map(choice).collect()
}

/// A token in the list `logprobs.content`.
fn of_token(encoder: &PromptEncoder, own: &TokenLikelihood, count: usize) -> Value {
    let one = |id: u32, log_probability: f32| {
        let token = encoder.token(id);
        json!({ "bytes": encoder.bytes(id), "token": token, "logprob": log_probability })
    };
    let mut entry = one(own.id, own.log_probability);
    entry["top_logprobs"] = own.most_likely.iter().take(count).map(|&(id, value)| one(id, value)).collect();
    entry
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::data::Tokenizer;

    #[test]
    fn all_parts_of_a_character_stand_where_it_begins() {
        let model = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let tokenizer = Tokenizer::load(&model).unwrap();
        let (text, ids) = ("a 😀 b", tokenizer.encode("a 😀 b").unwrap());
        let encoder = PromptEncoder {
            tokenizer: Some(tokenizer),
            template: None,
            variables: Map::new(),
            special_tokens: Vec::new(),
            max_bytes: usize::MAX,
        };
        let likelihood = |&id: &u32| TokenLikelihood { id, log_probability: 0.0, most_likely: Vec::new() };
        let told = WholeText { likelihoods: ids.iter().map(likelihood).collect(), ..WholeText::default() };
        let offsets = likelihoods_of(&encoder, &[], &[], &told, text, 0)["text_offset"].take();
        let mut begun = 0;
        let expected = ids.iter().map(|&id| {
            // The character in which the token begins.
            let at = (0..=begun).rev().find(|&at| text.is_char_boundary(at)).map_or(0, |at| text[..at].chars().count());
            begun += encoder.bytes(id).unwrap().len();
            at
        });
        let expected: Vec<usize> = expected.collect();
        assert!(expected.windows(2).any(|pair| pair[0] == pair[1]), "{expected:?}");
        assert_eq!((offsets, begun), (json!(expected), text.len()));
        // What goes on nothing is a character of its own, as it is shown.
        let of_byte = |byte| (0..512).find(|&id| encoder.bytes(id) == Some(vec![byte])).unwrap();
        let ids = [0x80, 0xf0, b'a', 0x80, 0x80].map(of_byte);
        let told = WholeText { likelihoods: ids.iter().map(likelihood).collect(), ..WholeText::default() };
        assert_eq!(
            likelihoods_of(&encoder, &[], &[], &told, "\u{fffd}\u{fffd}a\u{fffd}\u{fffd}", 0)["text_offset"],
            json!([0, 1, 2, 3, 4])
        );
        // Special tokens are in a text that was sent with them, and left out of what is written.
        let end = *encoder.tokenizer.as_ref().unwrap().encode("<|im_end|>").unwrap().first().unwrap();
        let ids = [end, of_byte(b'a'), end, of_byte(b'b')];
        let told = WholeText { likelihoods: ids.iter().map(likelihood).collect(), ..WholeText::default() };
        assert_eq!(likelihoods_of(&encoder, &[], &[], &told, "ab", 0)["text_offset"], json!([0, 0, 1, 1]));
        assert_eq!(likelihoods_of(&encoder, &[], &[], &told, "<|im_end|>ab", 0)["text_offset"], json!([0, 10, 11, 11]));
    }
}
