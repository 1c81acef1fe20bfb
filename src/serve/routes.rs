//! The HTTP side: who may ask, what a body may be, and which path leads where.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::channel;

use super::ApiError;
use super::access::only_from_allowed;
use super::access_log::logged;
use super::app_state::{AppState, PLACES};
use super::body::BodyLimits;
use super::completions::{chat_completions, completions};
use super::counters::Counters;
use super::engine_loop::EngineLoop;
use super::fields::MAX_COUNT;
use super::job::gather;
use super::listen::listen;
use super::options::ServeOptions;
use super::responses::responses;
use super::tokens::PromptEncoder;
use crate::data::ChatTemplates;
use crate::generation::{GenerationRules, Generator, LikelihoodsOf};
use crate::report::console;
use crate::units::{Exit, Fault};

/// Serves a model until `stops` says so and all that was begun has ended. `rules` are the model's own: what ends a text.
pub fn serve(
    generator: Generator<'_>,
    encoder: PromptEncoder,
    rules: GenerationRules,
    options: ServeOptions,
    stops: impl Fn() -> bool + Send + Sync + 'static,
) -> Result<(), Fault> {
    let address = format!("{}:{}", options.host, options.port);
    let listening = std::net::TcpListener::bind(&address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok((listener.local_addr()?, listener))
    });
    let (local, listener) = listening.map_err(|error| {
        Fault::usage(format!("cannot listen on {address}: {error}"), "choose another `--port`; 0 takes a free one")
    })?;
    console::outcome(&format!("listening on http://{local}"), &json!({ "listening": format!("http://{local}") }))?;
    let (jobs, waiting) = channel(options.queue.max(1));
    let counters = Arc::new(Counters::default());
    let options = Arc::new(options);
    let state = AppState {
        encoder: Arc::new(encoder),
        rules,
        options: Arc::clone(&options),
        prompts: generator.limits,
        jobs,
        bodies: BodyLimits::new(options.max_body),
        places: Arc::new(Semaphore::new(PLACES)),
        counters: counters.clone(),
    };
    let keep = options.keep;
    let http = std::thread::spawn(move || listen(routes(Arc::new(state)), &options, listener, stops));
    EngineLoop::new(generator, keep, &counters).run(waiting);
    let ended = http.join().unwrap_or_else(|_| Err(std::io::Error::other("the HTTP thread has failed")));
    ended.map_err(|error| {
        Fault::new(Exit::Failed, format!("the server can not begin: {error}")).with_hint("look at the limits of this process")
    })
}

fn routes(state: Arc<AppState>) -> Router {
    let options = Arc::clone(&state.options);
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/responses", post(responses))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/generate", put(generate).post(generate))
        .route("/metrics", get(metrics))
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "there is no such path"))
        .method_not_allowed_fallback(async || ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method"))
        .layer(from_fn_with_state(state.clone(), knows_the_key))
        .route("/health", get(async || StatusCode::OK))
        .layer(from_fn_with_state(Arc::clone(&options), only_from_allowed))
        .layer(from_fn_with_state(options.access_log, logged))
        .with_state(state)
}

/// Lets nobody in who does not know the key. Hashes are compared, so that the time tells nothing about it.
async fn knows_the_key(State(served): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let given = given.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    let given = given.map(|(_, key)| blake3::hash(key.trim().as_bytes()));
    if served.options.api_key.is_some() && given != served.options.api_key {
        let message = "send the API key of this server as `Authorization: Bearer KEY`";
        return ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key").into_response();
    }
    next.run(request).await
}

fn own_model(served: &AppState) -> Value {
    json!({
        "id": served.options.name, "object": "model", "created": 0, "owned_by": "kvtune", "root": served.options.name,
        "max_model_len": served.prompts.longest,
    })
}

async fn models(State(served): State<Arc<AppState>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [own_model(&served)] }))
}

async fn model(State(served): State<Arc<AppState>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    served.check_name(&name).map(|()| Json(own_model(&served)))
}

async fn metrics(State(served): State<Arc<AppState>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    ([(header::CONTENT_TYPE, kind)], served.counters.to_text()).into_response()
}

async fn tokenize(State(served): State<Arc<AppState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let (mut fields, permit) = served.fields(request).await?;
    served.check_model(&mut fields)?;
    let ids = served
        .apart(Some(permit), move |encoder| {
            let adds_special = fields.flag("add_special_tokens", true)?;
            let ids = match fields.text("prompt")? {
                Some(text) => encoder.encode(&text, adds_special),
                None => encoder.conversation(&mut fields),
            };
            ids.and_then(|ids| fields.finish().map(|()| ids))
        })
        .await?;
    Ok(Json(json!({ "count": ids.len(), "max_model_len": served.prompts.longest, "tokens": ids })))
}

async fn detokenize(State(served): State<Arc<AppState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let (mut fields, permit) = served.fields(request).await?;
    served.check_model(&mut fields)?;
    let wrong = || ApiError::field("tokens", "`tokens` must be a list of token ids");
    let ids = fields.take("tokens").ok_or_else(wrong)?;
    let ids: Vec<u32> = serde_json::from_value(ids).map_err(|_| wrong())?;
    let most = served.prompts.vocab_size;
    if let Some(id) = ids.iter().find(|id| **id as usize >= most) {
        return Err(ApiError::field("tokens", format!("token {id} is not in the vocabulary of {most}")));
    }
    fields.finish()?;
    Ok(Json(json!({ "prompt": served.apart(Some(permit), move |encoder| encoder.decode(&ids)).await? })))
}

async fn tokenizer_info(State(served): State<Arc<AppState>>) -> Json<Value> {
    let mut info = json!({ "chat_template": served.encoder.template.as_ref().and_then(ChatTemplates::source) });
    for (name, token) in &served.encoder.special_tokens {
        info[name] = json!(token);
    }
    Json(info)
}

/// The protocol of RULER's own client.
async fn generate(State(served): State<Arc<AppState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let (mut fields, permit) = served.fields(request).await?;
    let prompt = fields.take("prompt").ok_or_else(|| ApiError::field("prompt", "`prompt` is missing"))?;
    let samples = fields.count("n", 1..=MAX_COUNT)?.unwrap_or(1);
    if fields.flag("stream", false)? {
        return Err(ApiError::field("stream", "this path does not stream: use /v1/completions"));
    }
    let rules = fields.rules(&served.rules)?;
    let prompts = served.apart(Some(permit), move |encoder| encoder.prompts(&prompt, true)).await?;
    let answers = served.ask(&prompts, &rules, samples, LikelihoodsOf::default())?;
    let all = served.in_time(gather(answers)).await?;
    let texts: Vec<&String> = all.iter().flat_map(|prompt| prompt.texts.iter().map(|text| &text.text)).collect();
    Ok(Json(json!({ "text": texts })))
}
