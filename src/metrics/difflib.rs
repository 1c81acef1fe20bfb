//! Python's `difflib.SequenceMatcher(None, a, b).ratio()`, which decides how similar lines of code are.

use std::collections::HashMap;

/// Twice the characters in matching blocks, by the characters of both; 1 for two empty texts.
pub(super) fn ratio(a: &str, b: &str) -> f64 {
    let [a, b] = [a, b].map(|text| text.chars().collect::<Vec<_>>());
    let mut places: HashMap<char, Vec<usize>> = HashMap::new();
    for (at, c) in b.iter().enumerate() {
        places.entry(*c).or_default().push(at);
    }
    // Its rule against slowness: in a long text, characters of more than one per cent begin no block.
    if b.len() >= 200 {
        places.retain(|_, places| places.len() <= b.len() / 100 + 1);
    }
    let mut matches = 0;
    let mut open = vec![([0, a.len()], [0, b.len()])];
    while let Some(([a_low, a_high], [b_low, b_high])) = open.pop() {
        let (i, j, size) = longest(&a, &b, &places, [a_low, a_high], [b_low, b_high]);
        if size > 0 {
            matches += size;
            open.push(([a_low, i], [b_low, j]));
            open.push(([i + size, a_high], [j + size, b_high]));
        }
    }
    let characters = a.len() + b.len();
    if characters == 0 { 1.0 } else { 2.0 * matches as f64 / characters as f64 }
}

/// `find_longest_match`: the first of the longest blocks, extended by characters that begin none.
fn longest(
    a: &[char],
    b: &[char],
    places: &HashMap<char, Vec<usize>>,
    [a_low, a_high]: [usize; 2],
    [b_low, b_high]: [usize; 2],
) -> (usize, usize, usize) {
    let (mut i, mut j, mut size) = (a_low, b_low, 0);
    // Length of the block that ends in the character before, by its end in `b`.
    let mut lengths: HashMap<usize, usize> = HashMap::new();
    for (at, c) in a.iter().enumerate().take(a_high).skip(a_low) {
        let mut next = HashMap::new();
        for &place in places.get(c).map(Vec::as_slice).unwrap_or_default() {
            if !(b_low..b_high).contains(&place) {
                continue;
            }
            let length = place.checked_sub(1).and_then(|before| lengths.get(&before)).unwrap_or(&0) + 1;
            next.insert(place, length);
            if length > size {
                (i, j, size) = (at + 1 - length, place + 1 - length, length);
            }
        }
        lengths = next;
    }
    while i > a_low && j > b_low && a[i - 1] == b[j - 1] {
        (i, j, size) = (i - 1, j - 1, size + 1);
    }
    while i + size < a_high && j + size < b_high && a[i + size] == b[j + size] {
        size += 1;
    }
    (i, j, size)
}

#[cfg(test)]
mod tests {
    use super::ratio;

    #[test]
    fn popular_characters_begin_no_block() {
        assert!((ratio("abcd", "bcde") - 0.75).abs() < 1e-15 && (ratio("", "") - 1.0).abs() < 1e-15);
        assert!(ratio("baa", &format!("c{}", "a".repeat(199))).abs() < 1e-15);
        assert!((ratio("baa", &format!("c{}", "a".repeat(198))) - 4.0 / 202.0).abs() < 1e-15);
        // But it goes on with them.
        assert!((ratio("xaa", &format!("x{}", "a".repeat(199))) - 6.0 / 203.0).abs() < 1e-15);
    }
}
