//! Porter's stemmer of 1980 with the extensions of NLTK (`PorterStemmer()`, mode `NLTK_EXTENSIONS`), which ROUGE scores are made with.
//!
//! M. Porter, "An algorithm for suffix stripping", Program 14.3 (1980). The extensions: a list of irregular words, `ies` and `ied` of words
//! of four letters, `y` after a consonant, `alli`, `bli`, `fulli` and `logi`, and short stems that keep their `e`.

/// Suffixes, and what takes their place.
type SuffixRules = [(&'static str, &'static str)];

const STEP_2: &SuffixRules = &[
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("fulli", "ful"),
];

const STEP_3: &SuffixRules =
    &[("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")];

const STEP_4: [&str; 19] = [
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti", "ous",
    "ive", "ize",
];

fn irregular(word: &str) -> Option<&str> {
    match word {
        "skies" => Some("sky"),
        "dying" => Some("die"),
        "lying" => Some("lie"),
        "tying" => Some("tie"),
        "innings" | "outings" | "cannings" => word.strip_suffix('s'),
        "sky" | "news" | "inning" | "outing" | "canning" | "howe" | "proceed" | "exceed" | "succeed" => Some(word),
        _ => None,
    }
}

/// The stem of a word in lower case; what is not made of ASCII's letters and digits stays as it is.
pub fn stem(word: &str) -> String {
    if let Some(stem) = irregular(word) {
        return stem.to_owned();
    }
    if word.len() <= 2 || !word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) {
        return word.to_owned();
    }
    let mut word = step_1b(step_1a(word));
    if let Some(stem) = word.strip_suffix('y').filter(|stem| stem.len() > 1 && ends_in_consonant(stem)) {
        word = format!("{stem}i");
    }
    let word = apply(&step_2(&word), STEP_3);
    let mut word = step_4(&word).to_owned();
    if let Some(stem) = word.strip_suffix('e')
        && (is_longer(stem) || measure(stem) == 1 && !ends_short(stem))
    {
        word.pop();
    }
    if word.ends_with("ll") && is_longer(&word[..word.len() - 1]) {
        word.pop();
    }
    word
}

/// The first rule whose suffix the word has decides, whether the stem before it is long or not.
fn apply(word: &str, rules: &SuffixRules) -> String {
    let found = rules.iter().find_map(|(suffix, instead)| Some((word.strip_suffix(suffix)?, instead)));
    match found {
        Some((stem, instead)) if is_long(stem) => format!("{stem}{instead}"),
        _ => word.to_owned(),
    }
}

fn step_1a(word: &str) -> &str {
    match word {
        _ if word.ends_with("ies") => &word[..word.len() - if word.len() == 4 { 1 } else { 2 }],
        _ if word.ends_with("sses") => &word[..word.len() - 2],
        _ if word.ends_with("ss") => word,
        _ => word.strip_suffix('s').unwrap_or(word),
    }
}

/// `-ied`, `-eed`, `-ed` and `-ing`.
fn step_1b(word: &str) -> String {
    if word.ends_with("ied") {
        return word[..word.len() - if word.len() == 4 { 1 } else { 2 }].to_owned();
    }
    if let Some(stem) = word.strip_suffix("eed") {
        return if is_long(stem) { format!("{stem}ee") } else { word.to_owned() };
    }
    let has_vowel = |stem: &&str| consonants(stem).contains(&false);
    let Some(stem) = ["ed", "ing"].iter().find_map(|suffix| word.strip_suffix(suffix).filter(has_vowel)) else {
        return word.to_owned();
    };
    let end = &stem.as_bytes()[stem.len().saturating_sub(2)..];
    if ["at", "bl", "iz"].iter().any(|suffix| stem.ends_with(suffix)) {
        format!("{stem}e")
    } else if let [first, second] = end
        && first == second
        && ends_in_consonant(stem)
    {
        if b"lsz".contains(second) { stem.to_owned() } else { stem[..stem.len() - 1].to_owned() }
    } else if measure(stem) == 1 && ends_short(stem) {
        format!("{stem}e")
    } else {
        stem.to_owned()
    }
}

/// Double suffixes. What `alli` leaves may have another one.
fn step_2(word: &str) -> String {
    if word.ends_with("logi") {
        // The `l` counts for the stem, so that `geologi` is long enough.
        return apply(word, &[("ogi", "og")]);
    }
    match word.strip_suffix("alli").filter(|stem| is_long(stem)) {
        Some(stem) => step_2(&format!("{stem}al")),
        None => apply(word, STEP_2),
    }
}

/// Here, too, the first suffix decides.
fn step_4(word: &str) -> &str {
    let found = STEP_4.iter().find_map(|suffix| Some((word.strip_suffix(suffix)?, *suffix)));
    match found {
        Some((stem, "ion")) if !stem.ends_with(['s', 't']) => word,
        Some((stem, _)) if is_longer(stem) => stem,
        _ => word,
    }
}

/// Which letters are consonants: a `y` is one at the beginning and behind a vowel.
fn consonants(word: &str) -> Vec<bool> {
    let mut consonants: Vec<bool> = Vec::with_capacity(word.len());
    for byte in word.bytes() {
        consonants.push(match byte {
            b'a' | b'e' | b'i' | b'o' | b'u' => false,
            b'y' => consonants.last().is_none_or(|before| !before),
            _ => true,
        });
    }
    consonants
}

fn ends_in_consonant(word: &str) -> bool {
    consonants(word).last().is_some_and(|is| *is)
}

/// How often a consonant follows a vowel: Porter's m.
fn measure(stem: &str) -> usize {
    consonants(stem).windows(2).filter(|pair| **pair == [false, true]).count()
}

fn is_long(stem: &str) -> bool {
    measure(stem) > 0
}

fn is_longer(stem: &str) -> bool {
    measure(stem) > 1
}

/// Whether it ends in consonant, vowel, consonant, the last not w, x or y; or is a vowel and a consonant.
fn ends_short(stem: &str) -> bool {
    match consonants(stem)[..] {
        [false, true] => true,
        [.., true, false, true] => !stem.ends_with(['w', 'x', 'y']),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::stem;

    #[test]
    fn the_extensions_hold() {
        let pairs = "flies fli|dies die|died die|spied spi|enjoy enjoy|spy spi|skies sky|succeed succeed|geology geolog|radically radic|\
                     are are|agreed agre|feed feed|controlling control|hopefully hope|ed ed|yyed yy|rational ration|x264s x264";
        for pair in pairs.split('|') {
            let (word, expected) = pair.split_once(' ').unwrap_or_default();
            assert_eq!(stem(word), expected, "{word}");
        }
    }
}
