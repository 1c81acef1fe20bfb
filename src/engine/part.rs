//! A chunk whose tokens come in parts, as those of a text that is being written: its victims leave when its first token comes, a token sees
//! what is left and those of the chunk before it, and the policy hears of the attention when the last has come. That is what the chunk does
//! whose tokens come at once.

use tch::Tensor;

use super::attended_chunk::{AttendedChunk, ChunkPart, ChunkSaved, PartialChunk};
use super::layer_state::LayerState;
use super::undo_log::KeepUndo;
use crate::cache::{ChunkSpan, Placement, Policy};
use crate::ops::attention::{self, Attended, KvBlock, Qkv};
use crate::recipe::BufferKind;
use crate::units::Fault;

impl LayerState {
    /// The next tokens of a chunk: as [`Self::forward_chunk`], once its last token has come.
    pub(super) fn forward_part(&mut self, policy: &dyn Policy, part: &ChunkPart, tokens: &Qkv) -> Result<Tensor, Fault> {
        let &ChunkPart { ref span, from } = part;
        let len = tokens.num_tokens() as usize;
        if len == span.len {
            return Ok(self.forward_chunk(policy, span, tokens, KeepUndo::Nothing)?.0);
        }
        if from == 0 {
            self.open(policy, span, tokens)?;
        }
        self.cache.write_part(span, from, &tokens.own);
        let attended = self.attend_part(part, tokens);
        self.partial.add(tokens, &attended);
        if from + len == span.len {
            self.close(policy, span, tokens);
        }
        Ok(attended.out_bhnd)
    }

    /// Lets the victims leave, and keeps their slots for the tokens to come.
    fn open(&mut self, policy: &dyn Policy, span: &ChunkSpan, tokens: &Qkv) -> Result<(), Fault> {
        self.choose_victims(policy, span);
        let victims = self.cache.recall(&self.log, span)?;
        let empty = |x: &Tensor| {
            let (batch, groups, _, width) = x.size4().unwrap_or_default();
            x.new_zeros([batch, groups, span.len as i64, width], (x.kind(), x.device()))
        };
        self.cache.write(span, victims, &tokens.own.map(empty))?;
        self.log.finish_chunk();
        self.partial = PartialChunk::default();
        Ok(())
    }

    fn attend_part(&self, part: &ChunkPart, tokens: &Qkv) -> Attended {
        let &ChunkPart { ref span, from } = part;
        let len = tokens.num_tokens() as usize;
        let region = self.cache.region(span);
        let here = region + from as i64;
        let part = ChunkSpan { start: span.start + from, len, real: vec![len; span.real.len()], ..span.clone() };
        let visible_until = self.visible_until(&part, &Placement::whole(), tokens.rule);
        let sees_itself = tokens.rule.window.is_none_or(|window| window >= len);
        let visible_part = |start: i64, slots: i64| visible_until.as_ref().map(|all| all.narrow(2, start, slots));
        let mut chunk = tokens.clone();
        chunk.own.visible_until = if sees_itself { None } else { visible_part(here, len as i64).map(|own| own.copy()) };
        let past = if self.cache.shape().buffer == BufferKind::Plain {
            let joined = self.joined().filter(|_| visible_until.is_none());
            chunk.joined = joined.map(|joined| joined.narrow(0, here + len as i64));
            self.pages(here, visible_until.as_ref())
        } else {
            let mut pages = self.pages(region, visible_until.as_ref());
            if from > 0 {
                pages.push(KvBlock { visible_until: visible_part(region, from as i64), ..KvBlock::cat(&self.partial.own) });
            }
            pages
        };
        attention::attend(&chunk, &past)
    }

    /// Lets the policy keep its statistics of the whole chunk.
    fn close(&mut self, policy: &dyn Policy, span: &ChunkSpan, tokens: &Qkv) {
        let PartialChunk { q, own, out, lse } = std::mem::take(&mut self.partial);
        let [q_bhnd, out_bhnd, lse_bhn] = [q, out, lse].map(|parts| Tensor::cat(&parts, 2));
        let own = KvBlock::cat(&own);
        let (chunk, past) = self.sides(span, &Qkv { q_bhnd, ..tokens.clone() }, own.clone(), &Placement::whole());
        let saved = ChunkSaved { chunk, attended: Attended { out_bhnd, lse_bhn }, placement: Placement::whole() };
        self.cache.note(policy, span, &own, &AttendedChunk { saved: &saved, past: &past, mass: None });
    }
}
