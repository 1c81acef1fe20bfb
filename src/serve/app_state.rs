//! What the HTTP side knows of the model and its limits; bodies are read and prompts queued here.

use std::future::Future;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::StatusCode;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Sender, unbounded_channel};
use tokio::time::{Instant, timeout_at};

use super::ApiError;
use super::access_log::LogLine;
use super::body::{BodyLimits, ReadingPermit};
use super::counters::{Counters, add};
use super::fields::BodyFields;
use super::job::{Answers, PromptJob, SHUTTING_DOWN};
use super::options::ServeOptions;
use super::tokens::PromptEncoder;
use crate::generation::{self, GenerationRules, LikelihoodsOf, PromptLimits};
use crate::native::{GivenUp, apart, num_given_up};

/// Requests that are read or written at a time. One that is given up keeps its place, and what it had, until it ends.
pub(super) const PLACES: usize = 4;

pub(super) struct AppState {
    /// What is given up with a request has it, and nothing else of the server: its queue ends when nobody can ask any more.
    pub(super) encoder: Arc<PromptEncoder>,
    pub(super) rules: GenerationRules,
    pub(super) options: Arc<ServeOptions>,
    pub(super) prompts: PromptLimits,
    pub(super) jobs: Sender<PromptJob>,
    pub(super) bodies: BodyLimits,
    pub(super) places: Arc<Semaphore>,
    pub(super) counters: Arc<Counters>,
}

impl AppState {
    pub(super) async fn fields(&self, request: Request) -> Result<(BodyFields, ReadingPermit), ApiError> {
        self.in_time(self.bodies.fields(request)).await
    }

    pub(super) fn check_model(&self, fields: &mut BodyFields) -> Result<(), ApiError> {
        fields.text("model")?.map_or(Ok(()), |name| self.check_name(&name))
    }

    pub(super) fn check_name(&self, name: &str) -> Result<(), ApiError> {
        let ServeOptions { name: own, path, .. } = &*self.options;
        if name == own || name == path {
            return Ok(());
        }
        let message = format!("the model `{name}` does not exist; this server has `{own}`");
        Err(ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found"))
    }

    /// Lets an answer to a prompt of so many tokens be as long as it gets, unless somebody says otherwise.
    pub(super) fn let_end_by_itself(&self, rules: &mut GenerationRules, num_prompt: usize) {
        // A longer prompt, which some models can read, gets the default number of new tokens.
        if num_prompt < self.prompts.longest {
            rules.max_length.get_or_insert(self.prompts.longest);
        }
    }

    /// Does what may take long, or works on what a client has sent, which then comes with a permit, beside the connections. What goes beyond
    /// its bounds is given up, and the server lives on.
    pub(super) async fn apart<T: Send + 'static>(
        &self,
        permit: Option<ReadingPermit>,
        work: impl FnOnce(&PromptEncoder) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let failed = |error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}"));
        let unavailable = |message: String| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message);
        let beyond = |given_up: GivenUp| match given_up {
            GivenUp::Beyond => ApiError::bad(format!("the request can not be read: {given_up}")),
            GivenUp::NoThread(_) => unavailable(given_up.to_string()),
        };
        if num_given_up() >= PLACES {
            return Err(unavailable(format!("{PLACES} requests before took too much memory or time, and have not ended")));
        }
        let place = Arc::clone(&self.places).acquire_owned();
        let place = self.in_time(async { place.await.map_err(|error| unavailable(error.to_string())) }).await?;
        let encoder = Arc::clone(&self.encoder);
        let work = move || {
            // What was read is free before others read as much.
            let (_place, _permit) = (place, permit);
            work(&encoder)
        };
        tokio::task::spawn_blocking(|| apart(work)).await.map_err(failed)?.map_err(beyond)?
    }

    /// Puts prompts into the queue, all or none.
    pub(super) fn ask(
        &self,
        prompts: &[Vec<u32>],
        rules: &GenerationRules,
        samples: usize,
        likelihoods: LikelihoodsOf,
    ) -> Result<Answers, ApiError> {
        let line = LogLine::here();
        add(&line.prompt_tokens, prompts.iter().map(Vec::len).sum());
        let refused = |error: ApiError| {
            add(&self.counters.refused, prompts.len());
            error
        };
        prompts.iter().try_for_each(|prompt| self.check_prompt(prompt, rules)).map_err(refused)?;
        let most = self.jobs.max_capacity();
        if prompts.len() > most {
            let message = format!("a request has {} prompts; {most} can wait at most", prompts.len());
            return Err(refused(ApiError::field("prompt", message)));
        }
        let places = self.jobs.try_reserve_many(prompts.len()).map_err(|error| {
            let message = match error {
                TrySendError::Full(()) => "too many requests are waiting: try again later",
                TrySendError::Closed(()) => SHUTTING_DOWN,
            };
            refused(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message))
        })?;
        let (answers, receiver) = unbounded_channel();
        for (index, (place, prompt)) in places.zip(prompts).enumerate() {
            let own = generation::Request::new(prompt.clone(), rules.clone());
            let mut request = generation::Request { samples, likelihoods, ..own };
            // Equal prompts shall have different texts.
            request.rules.seed = rules.seed.wrapping_add(if rules.is_seed_drawn { index as u64 } else { 0 });
            place.send(PromptJob { request, index, answers: answers.clone() });
        }
        Ok(Answers { events: receiver, line, prompts: prompts.len(), samples })
    }

    /// Fails where a prompt can not be continued: before anything is queued, or a stream has begun.
    fn check_prompt(&self, prompt: &[u32], rules: &GenerationRules) -> Result<(), ApiError> {
        let (tokens, most) = (prompt.len(), self.options.max_prompt);
        if tokens > most {
            let message = format!("a prompt has {tokens} tokens; this server takes {most}");
            return Err(ApiError::field("prompt", message).with_code("context_length_exceeded"));
        }
        self.prompts.check(prompt, rules).map(|_| ()).map_err(|error| ApiError::from(&error))
    }

    pub(super) async fn in_time<T>(&self, work: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        timeout_at(self.deadline(), work).await.map_err(|_| self.timed_out())?
    }

    pub(super) fn deadline(&self) -> Instant {
        LogLine::here().began + self.options.timeout
    }

    pub(super) fn timed_out(&self) -> ApiError {
        let message = format!("the request has taken longer than {} s", self.options.timeout.as_secs());
        ApiError::new(StatusCode::GATEWAY_TIMEOUT, message)
    }
}
