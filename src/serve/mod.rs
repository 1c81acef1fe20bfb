//! A server of OpenAI's protocol over one model and its cache: HTTP on one thread, the engine on another, a bounded queue between them.

mod access;
mod access_log;
mod api_error;
mod app_state;
mod body;
mod completions;
mod counters;
mod engine_loop;
mod fields;
mod job;
mod listen;
mod options;
mod reply;
mod responses;
mod routes;
mod tokens;

pub use api_error::ApiError;
pub use options::ServeOptions;
pub use routes::serve;
pub use tokens::PromptEncoder;
