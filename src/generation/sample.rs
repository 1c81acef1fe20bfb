//! A text that is being written, token by token.

use std::rc::Rc;

use tch::Tensor;

use super::StoppedText;
use super::likelihood::of_logits;
use super::request::{Continued, Finish, GenerationEvent, Request, RequestId};
use super::sampling::{DrawPlace, TokensSoFar};
use crate::data::Tokenizer;
use crate::engine::Session;
use crate::units::{Fault, FaultKind};

/// A text that is being written. Its session has read all of its tokens but the last.
pub(super) struct Sample {
    pub(super) request: RequestId,
    pub(super) index: usize,
    pub(super) session: Session,
    pub(super) ids: Vec<u32>,
    pub(super) reused: usize,
    pub(super) limit: usize,
    /// What was asked for, without its session.
    pub(super) asked: Rc<Request>,
    pub(super) text: StoppedText,
}

impl Sample {
    /// Tells the end of the text, and hands back what is kept.
    pub(super) fn finish(mut self, tokenizer: Option<&Tokenizer>, reason: Finish) -> Result<GenerationEvent, Fault> {
        let text = tokenizer.map(|tokenizer| self.text.finish(tokenizer)).transpose()?.unwrap_or_default();
        // A stop string may be complete only with what is handed out last.
        let reason = if self.text.has_stopped { Finish::Stop } else { reason };
        let evicted = self.session.entries().1;
        let session = self.asked.keeps_session.map(|_| Box::new(Continued { session: self.session, ids: self.ids }));
        Ok(GenerationEvent::Finished { sample: self.index, text, reason, evicted, reused: self.reused, session })
    }

    /// Chooses the next token by its logits `(V,)`; where the text ends with it, says why.
    pub(super) fn write(
        &mut self,
        logits_v: &Tensor,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<(GenerationEvent, Option<Finish>), Fault> {
        let asked = self.asked.clone();
        let (rules, num_prompt) = (&asked.rules, asked.prompt.len());
        let mut logits: Vec<f32> = Vec::try_from(logits_v).unwrap_or_default();
        let so_far = TokensSoFar { ids: &self.ids, num_prompt, eos: &rules.eos };
        let step = (self.ids.len() - num_prompt) as u64;
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
        let likelihood = asked.likelihoods.new_tokens.and_then(|top| of_logits(&logits_v.unsqueeze(0), &[id], top).pop());
        let end = if is_end || self.text.has_stopped {
            Some(Finish::Stop)
        } else {
            (self.ids.len() == num_prompt + self.limit).then_some(Finish::Length)
        };
        Ok((GenerationEvent::Token { sample: self.index, id, text, likelihood }, end))
    }
}
