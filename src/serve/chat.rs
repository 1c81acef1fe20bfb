//! `/v1/chat/completions`: a conversation by the model's chat template, and the assistant's next message.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::ApiError;
use super::app_state::AppState;
use super::fields::MAX_COUNT;
use super::job::{WholeText, gather};
use super::reply::ReplyHead;
use super::stream::stream;
use super::tokens::PromptEncoder;
use crate::generation::{LikelihoodsOf, TokenLikelihood};

pub(super) async fn chat_completions(State(served): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (mut fields, permit) = served.fields(request).await?;
    served.check_model(&mut fields)?;
    let (mut fields, prompt) = served
        .read_apart(permit, move |reader| {
            let prompt = reader.conversation(&mut fields)?;
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
    let work = move |reader: &PromptEncoder| Ok((choices(reader, &all[0].texts, new_tokens), all));
    let (choices, all) = served.apart(work).await?;
    Ok(Json(head.whole(&choices, &prompts, &all, &served.options.cache)).into_response())
}

/// One for each text; with likelihoods, where a client asks for them, and so many of the most likely tokens.
fn choices(reader: &PromptEncoder, texts: &[WholeText], likelihoods: Option<usize>) -> Vec<Value> {
    let choice = |(index, text): (usize, &WholeText)| {
        let told = likelihoods.map(|count| {
            let content: Vec<Value> = text.likelihoods.iter().map(|own| of_token(reader, own, count)).collect();
            json!({ "content": content })
        });
        json!({
            "index": index, "message": { "role": "assistant", "content": text.text },
            "finish_reason": text.reason.map(crate::generation::Finish::name), "logprobs": told,
        })
    };
    texts.iter().enumerate().map(choice).collect()
}

/// A token in the list `logprobs.content`.
fn of_token(reader: &PromptEncoder, own: &TokenLikelihood, count: usize) -> Value {
    let one = |id: u32, log_probability: f32| {
        let token = reader.token(id);
        json!({ "bytes": reader.bytes(id), "token": token, "logprob": log_probability })
    };
    let mut entry = one(own.id, own.log_probability);
    entry["top_logprobs"] = own.most_likely.iter().take(count).map(|&(id, value)| one(id, value)).collect();
    entry
}
