//! Sampling and stop strings beside the numbers of Transformers.

use kvtune::data::Tokenizer;
use kvtune::generation::{Candidate, DrawPlace, GenerationRules, StoppedText, TokensSoFar, probabilities};
use serde_json::{Value, json};

use super::{fixture, numbers, rows};

#[test]
fn every_rule_keeps_the_tokens_that_it_keeps_elsewhere() {
    for row in rows("sampling.jsonl") {
        let logit = |value: &Value| value.as_f64().map_or(f32::NEG_INFINITY, |logit| logit as f32);
        let mut logits: Vec<f32> = row["logits"].as_array().unwrap().iter().map(logit).collect();
        let mut rules = GenerationRules::default();
        // The rows name what is not the default of an empty list of rules.
        (rules.sampling.do_sample, rules.sampling.top_k) = (true, 0);
        let ids = numbers(&row["input_ids"]);
        let mut num_prompt = ids.len();
        for (key, value) in row["parameters"].as_object().unwrap() {
            match &key[..] {
                "prompt_length" => num_prompt = value.as_u64().unwrap() as usize,
                "eos" => assert!(rules.set("eos_token_id", value).unwrap()),
                _ => assert!(rules.set(key, value).unwrap(), "{key}"),
            }
        }
        let so_far = TokensSoFar { ids: &ids, num_prompt, eos: &rules.eos };
        if !rules.sampling.do_sample {
            let chosen = rules.sampling.choose(&mut logits.clone(), so_far, DrawPlace { seed: 0, sample: 0, step: 0 }).unwrap();
            assert_eq!(u64::from(chosen), row["argmax"].as_u64().unwrap(), "{row}");
        }
        rules.sampling.penalise(&mut logits, so_far);
        let everything =
            |(id, logit): (usize, &f32)| (*logit > f32::NEG_INFINITY).then_some(Candidate { id: id as u32, logit: *logit });
        let kept = if rules.sampling.do_sample {
            rules.sampling.candidates(&logits)
        } else {
            logits.iter().enumerate().filter_map(everything).collect()
        };
        assert_eq!(kept.iter().map(|candidate| candidate.id).collect::<Vec<_>>(), numbers(&row["kept"]), "{row}");
        let expected = row["probabilities"].as_array().unwrap().iter().map(|p| p.as_f64().unwrap());
        for (found, expected) in probabilities(&kept).into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found}, expected {expected}: {row}");
        }
    }
}

#[test]
fn a_text_ends_before_its_stop_string() {
    let tokenizer = Tokenizer::load(&fixture("model-qwen2")).unwrap();
    for row in rows("stop.jsonl") {
        let stops = row["stop"].as_array().unwrap().iter().map(|stop| stop.as_str().unwrap().to_owned()).collect();
        let mut stopped = StoppedText::new(stops, Some(&tokenizer), &[]);
        let (mut text, mut stops_after) = (String::new(), None);
        for (at, id) in numbers(&row["tokens"]).into_iter().enumerate() {
            text.push_str(&stopped.push(&tokenizer, id).unwrap());
            if stopped.has_stopped {
                stops_after = Some(at + 1);
                break;
            }
        }
        text.push_str(&stopped.finish(&tokenizer).unwrap());
        assert_eq!(
            (stops_after, text),
            (row["stops_after_tokens"].as_u64().map(|n| n as usize), row["text"].as_str().unwrap().to_owned())
        );
    }
}

/// A tokenizer like Llama 2's: words carry their blank in front, and what has no token is spelt in bytes.
fn of_bytes(dir: &std::path::Path) -> Tokenizer {
    let words = ["<unk>", "<s>", "</s>", "▁the", "▁cache", "▁", "a"].map(str::to_owned);
    let vocab: serde_json::Map<String, Value> =
        words.into_iter().chain((0..256).map(|byte| format!("<0x{byte:02X}>"))).zip((0..).map(Value::from)).collect();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false}],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab, "merges": []},
    });
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Tokenizer::load(dir).unwrap()
}

#[test]
fn characters_in_bytes_and_blanks_at_the_beginning_come_whole() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = of_bytes(dir.path());
    let bytes = |bytes: &[u8]| bytes.iter().map(|&byte| 7 + u32::from(byte)).collect::<Vec<_>>();
    let spelt = |text: &str| bytes(text.as_bytes());
    let (the, cache, begin) = (3, 4, 1);
    for (prompt, new, expected) in [
        (vec![], spelt("漢字😀"), "漢字😀"),
        (vec![begin], [vec![the], spelt("漢"), vec![cache], spelt("字é")].concat(), "the漢 cache字é"),
        (vec![begin, the], vec![cache, the], " cache the"),
        (spelt("漢"), spelt("字"), "字"),
        // The fifth last token begins within a character.
        (spelt("漢字"), spelt("字"), "字"),
        // Bytes that are no character stay so, and take no other with them.
        (vec![the], [spelt("漢"), bytes(&[0xE5, 0xAD])].concat(), "漢\u{FFFD}\u{FFFD}"),
        (vec![the], [bytes(&[0xFF; 20]), vec![cache]].concat(), &("\u{FFFD}".repeat(20) + " cache")),
    ] {
        let mut stream = StoppedText::new(vec![], Some(&tokenizer), &prompt);
        let mut text: String = new.iter().map(|&id| stream.push(&tokenizer, id).unwrap()).collect();
        text.push_str(&stream.finish(&tokenizer).unwrap());
        assert_eq!(text, expected, "{prompt:?} {new:?}");
    }
    // A stop string may be complete only when no more tokens come.
    let mut stream = StoppedText::new(vec!["\u{FFFD}".to_owned()], Some(&tokenizer), &[the]);
    let told = bytes(&[0xE5]).into_iter().map(|id| stream.push(&tokenizer, id).unwrap()).collect::<String>();
    assert_eq!((told, stream.has_stopped), (String::new(), false));
    assert_eq!((stream.finish(&tokenizer).unwrap(), stream.has_stopped), (String::new(), true));
}

#[test]
fn what_can_not_be_followed_is_named() {
    for (key, value, expected) in [
        ("temperature", "0", "`temperature` is 0, expected a number above 0; without `do_sample` the most likely token is taken"),
        ("top_p", "1.5", "`top_p` is 1.5, expected a number from 0 to 1"),
        ("eos_token_id", "[1, \"a\"]", "`eos_token_id` is [1,\"a\"], expected a token id, or a list of them"),
        ("stop", "[\"\"]", "`stop` is [\"\"], expected a text that is not empty, or a list of them"),
        ("num_beams", "4", "`num_beams` is 4, expected nothing, as this is not supported"),
        ("max_new_tokens", "0", "`max_new_tokens` is 0, expected a whole number of at least 1"),
    ] {
        let fault = GenerationRules::default().set(key, &serde_json::from_str(value).unwrap()).unwrap_err();
        assert_eq!(fault, expected);
    }
    let mut rules = GenerationRules::default();
    assert!(rules.set("seed", &Value::from(-2)).unwrap() && rules.seed == u64::MAX - 1);
    assert!(!GenerationRules::default().set("temprature", &Value::from(1)).unwrap(), "there is no such rule");
}
