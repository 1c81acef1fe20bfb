//! What a prompt has in common with what was read before it.

use crate::engine::{Session, Settings};

/// How many tokens of a prompt need not be read by a session that has read `read`: all of these, if the prompt begins with them and goes on.
/// Where nothing leaves a cache, a session that has read something else behind the common beginning goes back to the last whole chunk.
pub fn shared_tokens(settings: &Settings, read: &[u32], prompt: &[u32]) -> usize {
    let before_last = &prompt[..prompt.len().saturating_sub(1)];
    let shared = read.iter().zip(before_last).take_while(|(read, asked)| read == asked).count();
    match shared {
        all if all == read.len() => all,
        some if settings.keeps_all_exactly() => some - some % settings.chunk_size(),
        _ => 0,
    }
}

/// Whether a session can go back to where it had read `tokens` tokens.
pub fn can_begin(session: &Session, tokens: usize) -> bool {
    tokens > 0 && (session.num_tokens() == tokens || session.can_crop(tokens))
}

/// The session where it had read `tokens` tokens, if it can go back there.
pub fn at_beginning(mut session: Session, tokens: usize) -> Option<Session> {
    let can_begin = can_begin(&session, tokens);
    if can_begin && session.num_tokens() != tokens {
        session.crop(tokens);
    }
    can_begin.then_some(session)
}
