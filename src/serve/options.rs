//! What a server is told by whoever starts it: what it serves, where it listens, whom it answers, and how much it takes.

use std::time::Duration;

use serde_json::Value;

#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// What clients call the model, beside its path.
    pub name: String,
    pub path: String,
    /// Policy, cache length and chunk size, as replies tell them.
    pub cache: Value,
    pub host: String,
    /// 0 for a free one.
    pub port: u16,
    /// Hash of the key that clients must know.
    pub api_key: Option<blake3::Hash>,
    /// Prompts that wait, at most.
    pub queue: usize,
    /// Sessions that are held for prompts to come.
    pub keep: usize,
    /// From the coming of a request to the end of its reply.
    pub timeout: Duration,
    /// From the beginning of a connection, or the end of a reply, to the end of the head of a request.
    pub header_timeout: Duration,
    /// Bytes of a request's body at most.
    pub max_body: usize,
    /// Tokens of a prompt at most.
    pub max_prompt: usize,
    /// Further values of `Host` under which it is asked beyond the loopback's names and `host`, without ports.
    pub allow_hosts: Vec<String>,
    /// Origins of pages that may ask, as browsers send them: `https://example.org`; `*` for all.
    pub allow_origins: Vec<String>,
    pub access_log: bool,
}
