//! A chunk whose tokens come in parts, as those of a text that is being written: its victims leave when its first token comes, a token sees
//! what is left and those of the chunk before it, and the policy hears of the attention when the last has come. That is what the chunk does
//! whose tokens come at once.

use tch::Tensor;

use super::layer_state::LayerState;
use super::open_block::{ChunkPart, OpenBlock};
use super::sight::{AttendedChunk, ChunkSaved, OwnKeys, PastPage, PastPages};
use crate::cache::{CacheError, ChunkSpan, Placement, Policy};
use crate::ops::attention::{self, Attended, Qkv};
use crate::recipe::BufferKind;

impl LayerState {
    /// The next tokens of a chunk: as [`Self::decide`], once its last token has come.
    pub(super) fn decide_part(&mut self, policy: &dyn Policy, part: &ChunkPart, tokens: Qkv<'_>) -> Result<Tensor, CacheError> {
        let &ChunkPart { ref span, from } = part;
        let len = tokens.q_bhnd.size()[2] as usize;
        if len == span.len {
            return self.decide(policy, span, tokens, false);
        }
        if from == 0 {
            self.open(policy, span, tokens)?;
        }
        self.cache.write_part(span, from, tokens.k_bgnd, tokens.v_bgnd);
        let attended = self.attend_part(part, tokens);
        self.open.add(tokens, &attended);
        if from + len == span.len {
            self.close(policy, span, tokens);
        }
        Ok(attended.out_bhnd)
    }

    /// Lets the victims leave, and keeps their slots for the tokens to come.
    fn open(&mut self, policy: &dyn Policy, span: &ChunkSpan, tokens: Qkv<'_>) -> Result<(), CacheError> {
        self.choose(policy, span);
        let victims = self.cache.recall(&self.log, span)?;
        let empty = |x: &Tensor| {
            let (batch, groups, _, head_dim) = x.size4().unwrap_or_default();
            x.new_zeros([batch, groups, span.len as i64, head_dim], (x.kind(), x.device()))
        };
        self.cache.write(span, victims, &empty(tokens.k_bgnd), &empty(tokens.v_bgnd))?;
        self.log.settle();
        if self.forgets {
            self.log.forget();
        }
        self.open = OpenBlock::default();
        Ok(())
    }

    fn attend_part(&self, part: &ChunkPart, tokens: Qkv<'_>) -> Attended {
        let &ChunkPart { ref span, from } = part;
        let len = tokens.q_bhnd.size()[2] as usize;
        let region = self.cache.region(span);
        let here = region + from as i64;
        let part = ChunkSpan { start: span.start + from, len, real: vec![len; span.real.len()], ..span.clone() };
        let seen_until_bgc = self.seen_until(&part, &Placement::whole(), tokens.rule);
        let sees_itself = tokens.rule.window.is_none_or(|window| window >= len);
        let seen_part = |start: i64, slots: i64| seen_until_bgc.as_ref().map(|all| all.narrow(2, start, slots));
        let chunk = OwnKeys {
            q: tokens.q_bhnd.shallow_clone(),
            k: tokens.k_bgnd.shallow_clone(),
            v: tokens.v_bgnd.shallow_clone(),
            rule: tokens.rule,
            drain_h: tokens.drain_h.map(Tensor::shallow_clone),
            in_use_bgn: None,
            seen_until_bgn: if sees_itself { None } else { seen_part(here, len as i64).map(|own| own.copy()) },
        };
        let past = if self.cache.shape().buffer == BufferKind::Plain {
            let behind = here + len as i64;
            let joined = self.joined().filter(|_| seen_until_bgc.is_none());
            let joined = joined.map(|(k, v)| (k.narrow(2, 0, behind), v.narrow(2, 0, behind)));
            PastPages { pages: self.pages(here, seen_until_bgc.as_ref()), joined }
        } else {
            let mut pages = self.pages(region, seen_until_bgc.as_ref());
            if from > 0 {
                let (k, v) = (Tensor::cat(&self.open.k, 2), Tensor::cat(&self.open.v, 2));
                pages.push(PastPage { k, v, in_use_bgp: None, seen_until_bgp: seen_part(region, from as i64) });
            }
            PastPages { pages, joined: None }
        };
        attention::attend_and_sum(chunk.beside(&past), &past.parts(), None).0
    }

    /// Lets the policy take its notes of the whole chunk.
    fn close(&mut self, policy: &dyn Policy, span: &ChunkSpan, tokens: Qkv<'_>) {
        let OpenBlock { q, k, v, out, lse } = std::mem::take(&mut self.open);
        let [q, k, v, out_bhnd, lse_bhn] = [q, k, v, out, lse].map(|parts| Tensor::cat(&parts, 2));
        let (own, past) = {
            let whole = Qkv { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, ..tokens };
            self.sides(span, whole, (k.shallow_clone(), v.shallow_clone()), &Placement::whole())
        };
        let saved = ChunkSaved { own, attended: Attended { out_bhnd, lse_bhn }, placement: Placement::whole() };
        self.cache.note(policy, span, (&k, &v), &AttendedChunk { saved: &saved, past: &past, mass: None });
    }
}
