//! What `/metrics` tells, in the text format of Prometheus.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers that the engine's thread writes and anybody reads.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) requests: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) cancelled: AtomicU64,
    pub(super) finished: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) reused_tokens: AtomicU64,
    pub(super) new_tokens: AtomicU64,
    pub(super) queued: AtomicU64,
    pub(super) running: AtomicU64,
    pub(super) held: AtomicU64,
    pub(super) entries: AtomicU64,
    pub(super) evicted: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, amount: usize) {
    counter.fetch_add(amount as u64, Ordering::Relaxed);
}

pub(super) fn set(gauge: &AtomicU64, value: usize) {
    gauge.store(value as u64, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn to_text(&self) -> String {
        let rows = [
            ("requests_total", "counter", "Prompts that were taken", &self.requests),
            ("requests_refused_total", "counter", "Prompts that could not be carried out", &self.refused),
            ("requests_cancelled_total", "counter", "Prompts whose client has gone", &self.cancelled),
            ("texts_finished_total", "counter", "Texts that were written to their end", &self.finished),
            ("requests_failed_total", "counter", "Prompts that failed on the way", &self.failed),
            ("prompt_tokens_total", "counter", "Tokens of prompts", &self.prompt_tokens),
            ("prompt_tokens_reused_total", "counter", "Tokens of prompts that a held session had read", &self.reused_tokens),
            ("generated_tokens_total", "counter", "Tokens that were written", &self.new_tokens),
            ("evicted_entries_total", "counter", "Entries that have left the caches of finished texts", &self.evicted),
            ("requests_waiting", "gauge", "Prompts that wait, or are being read", &self.queued),
            ("texts_running", "gauge", "Texts that are being written", &self.running),
            ("sessions_held", "gauge", "Sessions that wait for a prompt to go on with", &self.held),
            ("cache_entries", "gauge", "Entries in the caches of running texts", &self.entries),
        ];
        let mut text = String::new();
        for (name, kind, help, value) in rows {
            let value = value.load(Ordering::Relaxed);
            let _ = writeln!(text, "# HELP kvtune_{name} {help}\n# TYPE kvtune_{name} {kind}\nkvtune_{name} {value}");
        }
        text
    }
}
