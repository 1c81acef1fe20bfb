//! Finds the initial part of a sequence: instructions and the like at the start of a prompt, which a policy may keep.

use std::ops::Range;

use super::faults;
use super::tokenizer::Tokenizer;
use crate::recipe::InitialPart;
use crate::units::Fault;

#[derive(Clone, Debug)]
pub struct InitialPartFinder {
    pub(super) rule: InitialPart,
    tokenizer: Tokenizer,
}

impl InitialPartFinder {
    pub fn new(rule: &InitialPart, tokenizer: Option<&Tokenizer>) -> Result<Self, Fault> {
        let missing = || {
            let hint = "put `tokenizer.json` into the model directory, or choose a policy that does not look for an initial part";
            faults::no_tokenizer("the initial part of a prompt").with_hint(hint)
        };
        Ok(Self { rule: rule.clone(), tokenizer: tokenizer.ok_or_else(missing)?.clone() })
    }

    /// The initial part of a prompt, behind pads on its left or with them. Its text is searched without special tokens.
    pub fn of(&self, ids: &[u32]) -> Result<Range<usize>, Fault> {
        let pads = ids.iter().take_while(|&&id| id == self.rule.pad_id).count();
        let rest = &ids[pads..];
        if rest.is_empty() {
            return Ok(0..ids.len());
        }
        let count = match self.rule.end_in(&self.tokenizer.decode(rest)?) {
            Some(end) => self.count_until(rest, end)?,
            None => rest.len(),
        };
        Ok(if self.rule.range_is_prefix { 0 } else { pads }..pads + count)
    }

    /// How many tokens it takes until the first `end` bytes of the text of `ids` are there.
    fn count_until(&self, ids: &[u32], end: usize) -> Result<usize, Fault> {
        // Half a character decodes to U+FFFD, and must not count.
        let reaches = |count: usize| {
            let text = self.tokenizer.decode(&ids[..count])?;
            Ok::<_, Fault>(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len() >= end)
        };
        if end == 0 {
            return Ok(0);
        }
        // The initial part is short and the sequence may be long: doubling, then halving.
        let (mut less, mut enough) = (0, ids.len().min(64));
        while enough < ids.len() && !reaches(enough)? {
            (less, enough) = (enough, ids.len().min(2 * enough));
        }
        while enough - less > 1 {
            let middle = usize::midpoint(less, enough);
            *(if reaches(middle)? { &mut enough } else { &mut less }) = middle;
        }
        Ok(enough)
    }
}

/// What is left of `range` when `cut` is taken out of the sequence: an end that is cut away moves to the cut.
pub(super) fn after_cut(range: &Range<usize>, cut: &Range<usize>) -> Range<usize> {
    let moved = |at: usize| if at <= cut.start { at } else { at.max(cut.end) - cut.len() };
    moved(range.start)..moved(range.end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::fixtures::{Fixture, tokenizer};
    use crate::data::{DataRequest, Sequence, open};
    use crate::recipe::{ClassList, HeadRecipe, OnTooLong, WrittenRegex};

    const PAD: u32 = 3;

    fn rule(end_regex: &str) -> InitialPart {
        let end_regex = WrittenRegex::new(end_regex).unwrap();
        InitialPart { end_regex, include_end_string: true, pad_id: PAD, range_is_prefix: true }
    }

    fn sequences(fixture: &Fixture, rule: &InitialPart) -> Vec<Sequence> {
        let splits =
            open(&DataRequest { initial: Some(rule), ..fixture.request(Some(&tokenizer())) }, &mut |_, _, _| {}).unwrap();
        splits.train.batch(&(0..splits.train.len()).collect::<Vec<_>>()).unwrap().sequences
    }

    fn line(prompt: &str) -> String {
        format!("{}\n", serde_json::json!({"prompt": prompt, "completion": " yes"}))
    }

    fn of_ids(ids: &[u32]) -> String {
        format!("{}\n", serde_json::json!({"input_ids": ids, "labels": ids}))
    }

    fn one(format: &str, line: String, rule: &InitialPart) -> (usize, usize) {
        sequences(&Fixture::new(format, line), rule)[0].initial.unwrap()
    }

    /// The text of a sequence's initial part.
    fn kept(sequence: &Sequence) -> String {
        let (start, end) = sequence.initial.unwrap();
        tokenizer().decode(&sequence.inputs[start..end]).unwrap()
    }

    #[test]
    fn a_prompt_is_kept_up_to_the_match_whichever_way_it_is_given() {
        let texts = ["Read this. ### the cache", "###", "no end here", "é ### é", "é### x ### y", "日本### the", "a ###"];
        for text in texts {
            for (include, regex) in [(true, "###"), (false, "###"), (true, "#+ ?"), (true, "本|é")] {
                let rule = InitialPart { include_end_string: include, ..rule(regex) };
                let sequence = sequences(&Fixture::new("prompt-completion", line(text)), &rule).swap_remove(0);
                let ids = tokenizer().encode(text).unwrap();
                // As token ids, with one more at the end, which is a target only.
                let given = sequences(&Fixture::new("tokens", of_ids(&[&ids[..], &[0]].concat())), &rule).swap_remove(0);
                assert_eq!(sequence.initial, given.initial, "{text}, {regex}");
                let end = rule.end_in(text).unwrap_or(text.len());
                let (kept, count) = (kept(&sequence), sequence.initial.unwrap().1);
                assert!(kept.len() >= end && kept.starts_with(&text[..end]), "{text}, {regex}: {kept}");
                // The last token is needed.
                let less = tokenizer().decode(&ids[..count.saturating_sub(1)]).unwrap();
                assert!(count == 0 || less.trim_end_matches('\u{fffd}').len() < end, "{text}, {regex}: {less}");
            }
        }
        let halves = tokenizer().encode("日").unwrap().len();
        assert!(halves > 1, "a character that is split over tokens");
        assert_eq!(one("prompt-completion", line("日本"), &rule("日")), (0, halves));
    }

    #[test]
    fn pads_on_the_left_belong_to_it_or_do_not() {
        let ids = tokenizer().encode("Read this. ### the cache").unwrap();
        let (_, alone) = one("tokens", of_ids(&ids), &rule("###"));
        let padded = of_ids(&[&[PAD; 5][..], &ids].concat());
        assert_eq!(one("tokens", padded.clone(), &rule("###")), (0, 5 + alone));
        let behind = InitialPart { range_is_prefix: false, ..rule("###") };
        assert_eq!(one("tokens", padded.clone(), &behind), (5, 5 + alone));
        // Without a match all of the sequence, of which the last token is not run.
        assert_eq!(one("tokens", padded.clone(), &rule("nowhere")), (0, 5 + ids.len() - 1));
        assert_eq!(one("tokens", padded, &InitialPart { range_is_prefix: false, ..rule("nowhere") }), (5, 5 + ids.len() - 1));
        assert_eq!(one("tokens", of_ids(&[PAD; 6]), &behind), (0, 5));
        // A pad id in the middle is a token, and a special one has no text.
        let middle = of_ids(&[&ids[..1], &[PAD], &ids[1..]].concat());
        assert_eq!(one("tokens", middle, &rule("###")), (0, alone + 1));
    }

    #[test]
    fn without_a_rule_there_is_none_and_without_a_tokenizer_an_error() {
        let fixture = Fixture::new("tokens", of_ids(&[5, 6, 7]));
        assert_eq!(fixture.open().unwrap().train.batch(&[0]).unwrap().sequences[0].initial, None);
        let error = open(&DataRequest { initial: Some(&rule("###")), ..fixture.request(None) }, &mut |_, _, _| {}).unwrap_err();
        assert!(error.hint().unwrap().contains("policy"));
        assert_eq!(error.to_string(), "the initial part of a prompt needs a tokenizer, and the model has no `tokenizer.json`");
    }

    #[test]
    fn special_tokens_belong_to_it_and_are_no_text() {
        let (finder, text) =
            (InitialPartFinder::new(&rule("###|im_end"), Some(&tokenizer())).unwrap(), "Read this. ### the cache");
        let plain = tokenizer().encode(text).unwrap();
        let alone = finder.of(&plain).unwrap();
        assert_eq!(finder.of(&[&[1], &plain[..]].concat()).unwrap(), 0..alone.end + 1);
        let marked = format!("<|im_start|>{text}<|im_end|>");
        assert_eq!(one("prompt-completion", line(&marked), &rule("###|im_end")), (0, alone.end + 1));
    }

    #[test]
    fn a_classified_prompt_has_one_too() {
        let line = serde_json::json!({"prompt": "Choose. ### the cache", "completion": "A"}).to_string();
        let sequence = sequences(&Fixture::new("prompt-completion", line).classify(), &rule("###")).swap_remove(0);
        assert_eq!(kept(&sequence), "Choose. ###");
        // What ends a text may pad, too: the class is then read at the prompt's last token, and the prompt is still whole.
        let line = serde_json::json!({"prompt": "Choose. ### the cache", "completion": "x"}).to_string();
        let mut fixture = Fixture::new("prompt-completion", line);
        fixture.head = HeadRecipe::SeqClassification(ClassList::Named(vec!["x".into(), "y".into()]));
        let (rule, tokenizer) = (rule("###"), tokenizer());
        let mut request = DataRequest { initial: Some(&rule), ..fixture.request(Some(&tokenizer)) };
        request.limits.pad = Some(tokenizer.eos().unwrap());
        let splits = open(&request, &mut |_, _, _| {}).unwrap();
        let sequence = splits.train.batch(&[0]).unwrap().sequences.swap_remove(0);
        assert_eq!(tokenizer.decode(&sequence.inputs).unwrap(), "Choose. ### the cache");
        assert_eq!(kept(&sequence), "Choose. ###");
        assert_eq!(splits.origins["the token that pads"], "0");
    }

    #[test]
    fn a_prompt_that_is_cut_keeps_what_is_left_of_it() {
        let words = |count: usize| "the cache holds ".repeat(count);
        let text = |before: usize, behind: usize| format!("{}###{}", words(before), words(behind));
        let (short, within, long) = (text(1, 60), text(30, 31), text(60, 1));
        let none = words(62);
        for (prompt, is_token_ids) in [&short, &within, &long, &none].into_iter().flat_map(|p| [(p, false), (p, true)]) {
            let fixture = if is_token_ids {
                let ids = tokenizer().encode(prompt).unwrap();
                let labels: Vec<i64> = std::iter::repeat_n(-100, ids.len()).chain([0]).collect();
                let ids = [&ids[..], &[0]].concat();
                Fixture::new("tokens", format!("{}\n", serde_json::json!({"input_ids": ids, "labels": labels})))
            } else {
                Fixture::new("prompt-completion", line(prompt))
            };
            let whole = sequences(&fixture, &rule("###")).swap_remove(0);
            let limit = whole.inputs.len() / 2;
            let cut = sequences(&fixture.limit(limit, OnTooLong::Truncate), &rule("###")).swap_remove(0);
            let (kept, (_, end)) = (kept(&cut), cut.initial.unwrap());
            if *prompt == short {
                assert_eq!((kept.as_str(), cut.initial), ("the cache holds ###", whole.initial));
            } else if *prompt == long {
                assert!(kept.ends_with("###"), "{kept}");
                assert_eq!(whole.inputs.len() - whole.initial.unwrap().1, cut.inputs.len() - end, "what follows is whole");
            } else if *prompt == within {
                // The end was cut away: only what stood before the cut is known to belong to it.
                assert!(end.abs_diff(limit / 2) <= 2 && whole.inputs[..end] == cut.inputs[..end], "{end} of {limit}");
            } else {
                let behind = whole.inputs.len() - whole.initial.unwrap().1;
                assert_eq!(end, cut.inputs.len() - behind, "all that is left of the prompt");
            }
        }
    }

    proptest! {
        #[test]
        fn a_cut_takes_away_what_it_covers(range in (0usize..30, 0usize..30), cut in (0usize..30, 0usize..30)) {
            let [range, cut] = [range, cut].map(|(a, b)| a.min(b)..a.max(b));
            let left = after_cut(&range, &cut);
            let count = range.clone().filter(|at| !cut.contains(at)).count();
            prop_assert_eq!(left.len(), count);
            let places: Vec<usize> = (0..30).filter(|at| !cut.contains(at)).collect();
            prop_assert!(left.clone().all(|at| range.contains(&places[at])));
        }
    }
}
