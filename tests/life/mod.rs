//! Runs of the binary from their first step to what they leave: interrupted, killed, resumed, out of room; and always to the bit.

mod accumulation;
mod crash;
mod earlier;
mod killed;
mod lengths;
mod lost_steps;
mod mapped;
mod power;
mod ranks;
mod resume;
mod resume_full;
mod scratch;
mod signals;
mod tampered;
mod torchrun;
mod workshop;
