//! What a download or a shared machine can bring: special files, bombs, malformed and tampered files, limits of the process. Each must be
//! refused with the right exit code and words, in bounded time and memory, and leave nothing behind.

mod adapters;
mod bombs;
mod case;
mod configs;
mod ground;
mod limits;
mod mutated;
mod mutations;
mod parsers;
mod places;
mod policies;
mod recipes;
mod rows;
mod runs;
mod secrets;
mod served;
mod sessions;
mod special;
mod templates;
mod tensors;
mod tokenizers;
mod words;
