//! A prompt that is read, and the texts that follow it, which are written token by token.

use std::rc::Rc;

use tch::Tensor;

use super::likelihood::of_logits;
use super::request::{Continued, Finish, GenerationEvent, Request, RequestId};
use super::sampling::{DrawPlace, TokensSoFar};
use super::{StoppedText, TokenLikelihood};
use crate::data::Tokenizer;
use crate::engine::Session;
use crate::units::{Fault, FaultKind};

/// A prompt that is being read, or has been: then without its session and likelihoods.
pub(super) struct Prefill {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) limit: usize,
    /// Tokens that its session had read at first, if it is of use.
    pub(super) reused: usize,
    pub(super) likelihoods: Vec<TokenLikelihood>,
    /// Tokens of the column that was read last.
    pub(super) last_column: usize,
}

/// A text that is being written. Its session has read all of its tokens but the last.
pub(super) struct Sample {
    /// The prompt that it follows.
    pub(super) of: Rc<Prefill>,
    pub(super) index: usize,
    pub(super) session: Session,
    pub(super) ids: Vec<u32>,
    pub(super) text: StoppedText,
}

impl Sample {
    /// Tells the end of the text, and hands back what is kept.
    pub(super) fn finish(mut self, tokenizer: Option<&Tokenizer>, reason: Finish) -> Result<GenerationEvent, Fault> {
        let text = tokenizer.map(|tokenizer| self.text.finish(tokenizer)).transpose()?.unwrap_or_default();
        // A stop string may be complete only with what is handed out last.
        let reason = if self.text.has_stopped { Finish::Stop } else { reason };
        let evicted = self.session.entries().1;
        let session = self.of.request.keeps_session.map(|_| Box::new(Continued { session: self.session, ids: self.ids }));
        Ok(GenerationEvent::Finished { sample: self.index, text, reason, evicted, reused: self.of.reused, session })
    }

    /// Chooses the next token by its logits `(V,)`; where the text ends with it, says why.
    pub(super) fn write(
        &mut self,
        logits_v: &Tensor,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<(GenerationEvent, Option<Finish>), Fault> {
        let of = self.of.clone();
        let (Request { rules, likelihoods, .. }, num_prompt) = (&of.request, of.request.prompt.len());
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
        let likelihood = likelihoods.new_tokens.and_then(|top| of_logits(&logits_v.unsqueeze(0), &[id], top).pop());
        let end = if is_end || self.text.has_stopped {
            Some(Finish::Stop)
        } else {
            (self.ids.len() == num_prompt + of.limit).then_some(Finish::Length)
        };
        Ok((GenerationEvent::Token { sample: self.index, id, text, likelihood }, end))
    }
}
