//! A text that is being written, token by token.

use std::sync::Arc;

use tch::Tensor;

use super::likelihood::of_logits;
use super::request::{Continued, Finish, GenerationEvent, RequestId};
use super::sampling::{DrawPlace, TokensSoFar};
use super::{GenerationRules, StoppedText};
use crate::data::Tokenizer;
use crate::engine::Session;
use crate::units::{Fault, FaultKind};

/// A text that is being written. Its session has read all of its tokens but the last.
pub(super) struct Sample {
    pub(super) request: RequestId,
    pub(super) index: usize,
    pub(super) session: Session,
    pub(super) ids: Vec<u32>,
    pub(super) num_prompt: usize,
    pub(super) limit: usize,
    pub(super) rules: Arc<GenerationRules>,
    pub(super) text: StoppedText,
    pub(super) num_likely: Option<usize>,
    pub(super) keeps_session: bool,
}

impl Sample {
    /// Tells the end of the text, and hands back what is kept.
    pub(super) fn finish(mut self, tokenizer: Option<&Tokenizer>, reason: Finish) -> Result<GenerationEvent, Fault> {
        let text = tokenizer.map(|tokenizer| self.text.finish(tokenizer)).transpose()?.unwrap_or_default();
        // A stop string may be complete only with what is handed out last.
        let reason = if self.text.has_stopped { Finish::Stop } else { reason };
        let evicted = self.session.entries().1;
        let session = self.keeps_session.then(|| Box::new(Continued { session: self.session, ids: self.ids }));
        Ok(GenerationEvent::Finished { sample: self.index, text, reason, evicted, session })
    }

    /// Chooses the next token by its logits `(V,)`; where the text ends with it, says why.
    pub(super) fn write(
        &mut self,
        logits_v: &Tensor,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<(GenerationEvent, Option<Finish>), Fault> {
        let rules = self.rules.clone();
        let mut logits: Vec<f32> = Vec::try_from(logits_v).unwrap_or_default();
        let so_far = TokensSoFar { ids: &self.ids, num_prompt: self.num_prompt, eos: &rules.eos };
        let step = (self.ids.len() - self.num_prompt) as u64;
        let place = DrawPlace { seed: rules.seed, sample: self.index as u64, step };
        let id = rules.sampling.choose(&mut logits, so_far, place).ok_or_else(|| {
            let message = "no token can come next: the rules forbid all of them, or the model's logits are not finite";
            let hint = "allow more tokens; `kvtune evaluate` says whether the model's loss is finite";
            Fault::failed(message).with_hint(hint).of_kind(FaultKind::NothingLikely)
        })?;
        self.ids.push(id);
        let is_end = rules.eos.contains(&id);
        let text = match tokenizer {
            Some(tokenizer) if !is_end => self.text.push(tokenizer, id)?,
            _ => String::new(),
        };
        let likelihood = self.num_likely.and_then(|top| of_logits(&logits_v.unsqueeze(0), &[id], top).pop());
        let end = if is_end || self.text.has_stopped {
            Some(Finish::Stop)
        } else {
            (self.ids.len() == self.num_prompt + self.limit).then_some(Finish::Length)
        };
        Ok((GenerationEvent::Token { sample: self.index, id, text, likelihood }, end))
    }
}
