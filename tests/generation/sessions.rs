//! Requests that share, come and go: each gets the text that it gets alone.

use kvtune::generation::{GenerationRules, Request, SamplingRules, SavedSession, SessionIdentity};

use super::{Used, new_tokens, texts};

/// Small caches, so that entries leave in the prompt and while a text is written.
const EVICTS: &[&str] = &["kv_cache.storage=preallocated", "kv_cache.cache_length=24", "kv_cache.chunk_size=8"];

fn with_policy(policy: &str) -> Vec<&str> {
    [EVICTS, &[policy]].concat()
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * i * 7 + seed * 31 + i) % 500 + 4).collect()
}

fn drawn(seed: u64, count: usize) -> GenerationRules {
    let sampling = SamplingRules { do_sample: true, temperature: 1.3, ..SamplingRules::default() };
    GenerationRules { sampling, seed, ..new_tokens(count) }
}

#[test]
fn a_text_does_not_depend_on_who_is_beside_it() {
    let initial = r#"kv_cache.policy={"smart-lastrec"={end_initial_regex="de", max_initial_fraction=0.4}}"#;
    for policy in ["kv_cache.policy=h2o", "kv_cache.policy=lastrec", "kv_cache.policy=snapkv", initial] {
        let used = Used::new("model-qwen2", &with_policy(policy), None);
        let request = |i: u32| Request::new(prompt(i, 5 + 23 * i), drawn(u64::from(i), 4 + 5 * i as usize));
        let together = texts(&mut used.generator(3), (0..6).map(request).collect());
        for i in 0..6 {
            assert_eq!(texts(&mut used.generator(3), vec![request(i)]), together[i as usize..=i as usize], "{policy}, {i}");
        }
    }
}

#[test]
fn fixed_widths_write_the_same_texts() {
    for (policy, buffer, length) in
        [("h2o", "plain", 24), ("h2o", "int8", 24), ("lastrec", "int4", 24), ("snapkv", "plain", 24), ("dense", "int8", 64)]
    {
        let own = [format!("policy={policy}"), format!("buffer={buffer}"), format!("cache_length={length}")];
        let own = own.map(|key| format!("kv_cache.{key}"));
        let set = [EVICTS, &own.each_ref().map(String::as_str)].concat();
        let request = |i: u32| Request::new(prompt(i, 5 + 23 * i), drawn(u64::from(i), 8));
        let written = |more: &[&str]| {
            let used = Used::new("model-qwen2", &[&set[..], more].concat(), None);
            texts(&mut used.generator(2), (0..3).map(request).collect())
        };
        assert_eq!(written(&["kv_cache.static=true"]), written(&[]), "{policy}, {buffer}");
    }
}

#[test]
fn the_initial_part_of_a_prompt_stays() {
    let smart = |most: &str| {
        let policy = format!("kv_cache.policy={{\"smart-lastrec\"={{end_initial_regex=\"de\", max_initial_fraction={most}}}}}");
        let used = Used::new("model-qwen2", &with_policy(&policy), None);
        texts(&mut used.generator(1), vec![Request::new(prompt(2, 90), new_tokens(12))])
    };
    let used = Used::new("model-qwen2", &with_policy("kv_cache.policy=lastrec"), None);
    let without = texts(&mut used.generator(1), vec![Request::new(prompt(2, 90), new_tokens(12))]);
    assert_ne!(smart("0.5"), smart("0.2"));
    assert_ne!(smart("0.5"), without);
}

#[test]
fn samples_share_the_prompt_and_differ() {
    let used = Used::new("model-qwen2", &with_policy("kv_cache.policy=h2o"), None);
    let request = |samples| Request { samples, ..Request::new(prompt(3, 60), drawn(5, 12)) };
    let of_four = texts(&mut used.generator(8), vec![request(4)]).remove(0);
    assert_eq!(of_four[..1], texts(&mut used.generator(8), vec![request(1)])[0]);
    assert!((1..4).all(|i| of_four[i].ids != of_four[0].ids), "{of_four:?}");
}

#[test]
fn a_request_that_is_let_go_leaves_the_others_as_they_are() {
    let used = Used::new("model-qwen2", &with_policy("kv_cache.policy=lastrec"), None);
    let request = |i: u32| Request::new(prompt(i, 40), drawn(u64::from(i), 12));
    let expected = texts(&mut used.generator(3), vec![request(1)]);
    let mut generator = used.generator(3);
    let others: Vec<_> = [2, 3].into_iter().map(|i| generator.submit(request(i)).unwrap()).collect();
    for _ in 0..4 {
        generator.step();
    }
    let waiting = generator.submit(request(4)).unwrap();
    others.into_iter().chain([waiting]).for_each(|id| generator.cancel(id));
    assert!(generator.is_idle());
    assert_eq!(texts(&mut generator, vec![request(1)]), expected);
}

#[test]
fn a_saved_session_goes_on_as_it_would_have() {
    let set = with_policy("kv_cache.policy=h2o");
    let used = Used::new("model-qwen2", &set, None);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("document.session");
    let (document, question) = (prompt(1, 90), prompt(2, 9));
    let identity = SessionIdentity {
        model: "m".into(),
        adapter: None,
        cache: [("kv_cache.policy".to_owned(), "\"h2o\"".to_owned())].into(),
        dtype: "f32".into(),
    };
    let read = used.generator(1).read(&document).unwrap();
    SavedSession::write(&path, &read, &document, &identity).unwrap();
    let on = (&used.engine, &used.model);
    let saved = SavedSession::read(&path, on.0, on.1, &identity, 200).unwrap();
    assert_eq!(saved.ids, document);
    let go_on = |session| {
        let whole = [&document[..], &question].concat();
        let request = Request { session: Some(session), ..Request::new(whole, drawn(9, 16)) };
        texts(&mut used.generator(1), vec![request])
    };
    let from_disk = go_on(saved.session);
    assert_eq!(from_disk, go_on(read));
    let other = SessionIdentity { adapter: Some("a".into()), ..identity.clone() };
    let error = SavedSession::read(&path, on.0, on.1, &other, 200).err().unwrap();
    assert!(error.to_string().contains("was saved with another `adapter`"), "{error}");
    std::fs::write(&path, b"something else").unwrap();
    assert!(SavedSession::read(&path, on.0, on.1, &identity, 200).is_err());
}

/// What has read another initial part is of no use, and has read nothing of the prompt.
#[test]
fn a_session_counts_for_what_is_used_of_it() {
    let initial = r#"kv_cache.policy={"smart-lastrec"={end_initial_regex="no such words", max_initial_fraction=0.4}}"#;
    for (policy, expected) in [("kv_cache.policy=h2o", 90), (initial, 0)] {
        let used = Used::new("model-qwen2", &with_policy(policy), None);
        let mut generator = used.generator(1);
        let document = prompt(1, 90);
        let session = Some(generator.read(&document).unwrap());
        let id = generator.submit(Request { session, ..Request::new([document, prompt(2, 9)].concat(), new_tokens(1)) }).unwrap();
        assert_eq!(generator.num_read(id), expected, "{policy}");
    }
}

#[test]
fn what_no_model_can_continue_is_refused() {
    let used = Used::new("model-qwen2", &[], None);
    let longest = used.model.config().trained_positions();
    for (prompt, rules, expected) in [
        (vec![], new_tokens(1), "the prompt has no tokens".to_owned()),
        (vec![3, 5120], new_tokens(1), "token 5120 of the prompt is not in the vocabulary of 512".to_owned()),
        (
            vec![3; 5],
            new_tokens(longest),
            format!("a prompt of 5 tokens and {longest} new ones are more than the {longest} positions of the model"),
        ),
    ] {
        assert_eq!(used.generator(1).submit(Request::new(prompt, rules)).unwrap_err().to_string(), expected);
    }
}
