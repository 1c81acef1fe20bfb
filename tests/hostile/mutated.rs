//! Files made from valid ones by seeded changes: bits, bytes, numbers, pieces that are gone, twice there or another's.

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

/// Numbers at which arithmetic goes wrong, as they stand in a text.
const NUMBERS: [&str; 14] = [
    "0",
    "-1",
    "1",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e400",
    "-0.0",
    "0.5",
    "NaN",
];
const BYTES: [u8; 12] = [0, 0xff, 0x7f, 0x80, b'"', b'\\', b'{', b'}', b'[', b']', b',', b'\n'];
const WORDS: [u64; 7] = [0, 1, u64::MAX, 1 << 63, 1 << 32, (1 << 32) - 1, 1 << 20];

/// The `number`th change of `file`; `other` lends pieces.
pub(super) fn mutated(file: &[u8], other: &[u8], number: u64) -> Vec<u8> {
    let mut drawn = ChaCha8Rng::seed_from_u64(number);
    let mut bytes = file.to_vec();
    for _ in 0..drawn.random_range(1..5) {
        if bytes.is_empty() {
            break;
        }
        change(&mut bytes, other, &mut drawn);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, other: &[u8], drawn: &mut ChaCha8Rng) {
    let at = drawn.random_range(0..bytes.len());
    let end = (at + drawn.random_range(1..64)).min(bytes.len());
    match drawn.random_range(0..10) {
        0 => bytes[at] ^= 1 << drawn.random_range(0..8),
        1 => bytes[at] = BYTES[drawn.random_range(0..BYTES.len())],
        2 => drop(bytes.drain(at..end)),
        3 => bytes.truncate(at),
        4 => {
            let piece = bytes[at..end].repeat(drawn.random_range(1..200));
            bytes.splice(at..at, piece);
        }
        5 => {
            let from = drawn.random_range(0..other.len());
            let piece = other[from..(from + end - at).min(other.len())].to_vec();
            bytes.splice(at..end, piece);
        }
        6 => {
            let word = WORDS[drawn.random_range(0..WORDS.len())].to_le_bytes();
            let width = word.len().min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&word[..width]);
        }
        7 => {
            let random: Vec<u8> = (at..end).map(|_| drawn.random()).collect();
            bytes.splice(at..end, random);
        }
        // Twice as often as the others: sizes are what most goes wrong with.
        _ => other_number(bytes, at, drawn),
    }
}

/// Replaces the first number behind a place.
fn other_number(bytes: &mut Vec<u8>, at: usize, drawn: &mut ChaCha8Rng) {
    let Some(first) = bytes[at..].iter().position(u8::is_ascii_digit).map(|first| at + first) else { return };
    let digits = bytes[first..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    bytes.splice(first..first + digits, NUMBERS[drawn.random_range(0..NUMBERS.len())].bytes());
}
