//! What rows of each format say, and ten of each that say nothing.

use serde_json::{Value, json};

use crate::data::fixtures::{Fixture, LIMITS, letters, tokenizer};
use crate::data::{DataError, SampleFate, Targets, survey};
use crate::recipe::{DataFormat, HeadRecipe, HelmetFamily, OnBadRow, OnTooLong};
use proptest::prelude::*;

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect::<Vec<_>>().concat()
}

/// The text of the first sample, its prompt, and its answers; the format is told from the fields.
fn told(row: &Value, family: Option<HelmetFamily>) -> (String, String, Vec<String>) {
    let mut fixture = Fixture::new(DataFormat::Helmet, lines(std::slice::from_ref(row)));
    fixture.recipe.family = family;
    fixture.recipe.format = family.map(|_| DataFormat::Helmet);
    let splits = fixture.open().unwrap();
    assert_eq!(splits.report.files[0].format.is_some(), family.is_none());
    let question = splits.train.question(0).unwrap();
    let inputs = &splits.train.batch(&[0]).unwrap().sequences[0].inputs;
    let text = |ids: &[u32]| tokenizer().decode(ids).unwrap();
    (text(&question.prompt), text(&inputs[question.prompt.len()..]), question.references)
}

#[test]
fn all_of_a_text_is_trained() {
    let mut fixture = Fixture::new(DataFormat::Text, lines(&[json!({"text": "the cache holds"}), json!({"text": "key"})]));
    fixture.recipe.format = None;
    let splits = fixture.open().unwrap();
    assert_eq!(
        splits.report.files[0].format.as_deref().map(|told| told.starts_with("`text` by the fields `text` of ")),
        Some(true)
    );
    let sequence = splits.train.batch(&[0]).unwrap().sequences.swap_remove(0);
    let ids = tokenizer().encode("the cache holds").unwrap();
    assert_eq!(sequence.inputs, ids);
    let Targets::NextToken(targets) = sequence.targets else { panic!("a class") };
    let expected: Vec<i64> = ids[1..].iter().copied().chain([0]).map(i64::from).collect();
    assert_eq!(targets, expected);
    let document = fixture.write("a.txt", "the cache holds");
    fixture.recipe.train = document.into();
    assert_eq!(fixture.open().unwrap().train.batch(&[0]).unwrap().sequences[0].inputs, ids);
    let labelled = Fixture::new(DataFormat::Text, lines(&[json!({"text": "a", "label": "C"}), json!({"text": "a", "label": 1})]));
    let batch = labelled.classify().open().unwrap().train.batch(&[0, 1]).unwrap();
    assert_eq!((&batch.sequences[0].targets, &batch.sequences[1].targets), (&Targets::Class(2), &Targets::Class(1)));
}

#[test]
fn rulers_prompt_ends_in_the_beginning_of_the_answer() {
    let row = json!({"index": 812, "input": "hay\nWhich?", "answer_prefix": " They are", "outputs": ["1", "22"], "length": 9});
    assert_eq!(told(&row, None), ("hay\nWhich? They are".into(), " 1, 22".into(), vec!["1".into(), "22".into()]));
    let row = json!({"input": "hay", "answer_prefix": " Answer: ", "outputs": ["x"]});
    assert_eq!(told(&row, None), ("hay Answer: ".into(), "x".into(), vec!["x".into()]));
}

#[test]
fn helmets_rows_have_the_wording_of_their_family() {
    let passage = |title: &str, text: &str| json!({"title": title, "text": text});
    let kilt = json!({"question": "who", "answers": ["Ben", "B."], "ctxs": [passage("L", "{x}"), passage("F", "y")],
        "demos": [{"question": "when", "answers": "1961", "ctxs": [passage("S", "z")]}]});
    let (prompt, reply, references) = told(&kilt, None);
    let demo = "Document (Title: S): z\n\nQuestion: when\nAnswer: 1961\n\n";
    let context = "Document (Title: L): {x}\n\nDocument (Title: F): y\n\nQuestion: who\nAnswer:";
    assert!(prompt.ends_with(&format!("Answer: [answer]\n\n{demo}{context}")), "{prompt}");
    assert_eq!((&reply[..], references), (" Ben", vec!["Ben".to_owned(), "B.".to_owned()]));
    let pairs =
        json!({"context": "JSON", "question": "k", "answer": "v", "num_kvs": 2, "demos": [["a", "b"], ["c", "d"], ["e", "f"]]});
    let (prompt, reply, _) = told(&pairs, None);
    let asked = "Key: a\nCorresponding value: b\n\nKey: c\nCorresponding value: d\n\nKey: k\nCorresponding value:";
    assert!(prompt.starts_with("JSON\n\nExtract") && prompt.ends_with(asked), "{prompt}");
    assert_eq!(reply, " v");
    let ranked = json!({"qid": "m", "query": "oil", "ctxs": [
        {"id": "7", "title": "W", "text": "w", "label": 0}, {"id": 12, "text": "o", "label": 2}]});
    let (prompt, reply, _) = told(&ranked, None);
    assert!(prompt.ends_with("\n\n[ID: 7] Document (Title: W): w\n\n[ID: 12] Document: o\n\nQuery: oil\nRanking:"), "{prompt}");
    assert_eq!(reply, " 12 > 7");
    let needle = |what: &str| json!({"context": "hay", "query": "q", "type_needle_v": what, "answer": ["1"]});
    assert!(told(&needle("number"), None).0.ends_with("\nThe special magic number for q mentioned in the provided text is"));
    assert!(told(&needle("uuids"), None).0.contains("What are all the special magic uuids for q mentioned"));
    let many = json!({"context": "a\nlabel: 1", "question": "b", "answer": "3"});
    let (prompt, reply, _) = told(&many, Some(HelmetFamily::Icl));
    assert!(prompt.ends_with("nothing else. \n\na\nlabel: 1\n\nb\nlabel:"), "{prompt}");
    assert_eq!(reply, " 3");
}

/// Each row beside a sound one is refused with its place and these words.
fn refused(format: DataFormat, head: &HeadRecipe, sound: &Value, cases: &[(Value, &str)]) {
    for (row, words) in cases {
        let mut fixture = Fixture::new(format, lines(&[sound.clone(), row.clone()]));
        fixture.head.clone_from(head);
        let error = fixture.error();
        assert!(error.starts_with("`train.jsonl:2`") && error.contains(words), "{row}: {error}");
    }
}

#[test]
fn ten_texts_that_are_none() {
    let sound = json!({"text": "a b", "label": "A"});
    let cases = [
        (json!({"txt": "a"}), "field `text` is missing, others are `txt`"),
        (json!({"text": 7}), "`text`: expected a string, found a number"),
        (json!({"text": null}), "`text`: expected a string, found null"),
        (json!({"text": ["a"]}), "`text`: expected a string, found an array"),
        (json!({"text": {"a": 1}}), "`text`: expected a string, found an object"),
        (json!({"text": ""}), "1 tokens and none to predict"),
        (json!([1]), "expected a JSON object, found an array"),
    ];
    refused(DataFormat::Text, &HeadRecipe::NextToken, &sound, &cases);
    let cases = [
        (json!({"text": "a", "label": "E"}), "`label`: expected one of the labels `A`"),
        (json!({"text": "a", "label": 4}), "`label`: expected a class from 0 to 3, found 4"),
        (json!({"text": "a"}), "field `label` is missing"),
    ];
    refused(DataFormat::Text, &letters(), &sound, &cases);
}

#[test]
fn ten_rows_of_ruler_that_are_none() {
    let sound = json!({"input": "a", "answer_prefix": " is", "outputs": ["1"]});
    let with = |field: &str, value: Value| {
        let mut row = sound.clone();
        row[field] = value;
        row
    };
    let cases = [
        (json!({"answer_prefix": " is", "outputs": ["1"]}), "field `input` is missing"),
        (json!({"input": "a", "outputs": ["1"]}), "field `answer_prefix` is missing"),
        (json!({"input": "a", "answer_prefix": " is"}), "field `outputs` is missing"),
        (with("input", json!(3)), "`input`: expected a string, found a number"),
        (with("input", json!(null)), "`input`: expected a string, found null"),
        (with("answer_prefix", json!(["x"])), "`answer_prefix`: expected a string, found an array"),
        (with("outputs", json!([])), "`outputs`: expected an array of at least 1 string, found an empty array"),
        (with("outputs", json!("1")), "`outputs`: expected an array of at least 1 string, found a string"),
        (with("outputs", json!(["1", 2])), "`outputs`: expected an array of at least 1 string, found a number at index 1"),
        (with("outputs", json!(null)), "`outputs`: expected an array of at least 1 string, found null"),
    ];
    refused(DataFormat::Ruler, &HeadRecipe::NextToken, &sound, &cases);
    let error = Fixture::new(DataFormat::Ruler, lines(&[sound])).classify().error();
    assert_eq!(error, "`data.format = \"ruler\"` has no classes, which the head asks for");
}

#[test]
fn ten_rows_of_helmet_that_are_none() {
    let sound = json!({"question": "q", "answers": ["a"], "ctxs": [{"title": "t", "text": "x"}]});
    let with = |field: &str, value: Value| {
        let mut row = sound.clone();
        row[field] = value;
        row
    };
    let pairs = |demos: Value| json!({"context": "c", "question": "q", "answer": "a", "num_kvs": 1, "demos": demos});
    let cases = [
        (json!({"question": "q", "answers": ["a"]}), "found fields of no family of HELMET (kilt, json_kv, msmarco, niah, icl)"),
        (with("ctxs", json!("x")), "`ctxs`: expected an array of passages"),
        (with("ctxs", json!(["x"])), "`ctxs`: expected objects, found \"x\" at index 0"),
        (with("ctxs", json!([{"title": "t"}])), "`ctxs`: expected a string as `text`, found none at index 0"),
        (with("answers", json!([])), "`answers`: expected an array of at least 1 string, found an empty array"),
        (with("answers", json!([1])), "`answers`: expected an array of at least 1 string, found a number at index 0"),
        (with("question", json!(1)), "`question`: expected a string, found a number"),
        (with("demos", json!([{"question": "q"}])), "field `ctxs` is missing"),
        (with("demos", json!([7])), "`demos`: expected objects, found 7 at index 0"),
        (pairs(json!([["a"]])), "`demos`: expected pairs of texts, found [\"a\"] at index 0"),
    ];
    refused(DataFormat::Helmet, &HeadRecipe::NextToken, &sound, &cases);
}

#[test]
fn a_format_is_told_from_all_first_rows_or_not_at_all() {
    let error = |rows: &[Value]| {
        let mut fixture = Fixture::new(DataFormat::Text, lines(rows));
        fixture.recipe.format = None;
        fixture.error()
    };
    let unknown = "`train.jsonl:1`: which `data.format` it is cannot be told: found the fields `a`, `b`";
    assert_eq!(error(&[json!({"a": 1, "b": 2})]), unknown);
    let mixed = error(&[json!({"text": "a"}), json!({"prompt": "a", "completion": "b"})]);
    assert!(mixed.starts_with("`train.jsonl:2`: ") && mixed.contains("`prompt-completion` by the fields"), "{mixed}");
    assert!(error(&[]).ends_with("holds no samples, expected at least 1"));
}

#[test]
fn bad_rows_are_listed_or_left_out() {
    let rows: Vec<Value> = (0..30).map(|i| if i % 2 == 0 { json!({"text": "a b c"}) } else { json!({"text": i}) }).collect();
    let mut fixture = Fixture::new(DataFormat::Text, lines(&rows));
    let error = fixture.error();
    assert!(
        error.starts_with("15 of 30 rows of the data files cannot be read; the first 10 are\n  `train.jsonl:2`: "),
        "{error}"
    );
    assert_eq!(error.lines().count(), 11);
    fixture.recipe.on_bad_row = OnBadRow::Drop;
    let splits = fixture.open().unwrap();
    assert_eq!((splits.train.len(), splits.report.files[0].bad, splits.report.files[0].rows), (15, 15, 30));
    fixture.write("train.jsonl", "{\n\n{");
    assert!(fixture.error().starts_with("`train.jsonl:1` is not JSON"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_row_is_counted_once(
        rows in prop::collection::vec((0..40_usize, any::<bool>()), 1..30), limit in 2..40_usize, too_long in 0..2_usize,
    ) {
        let row = |&(words, is_bad): &(usize, bool)| if is_bad {
            "{\"prompt\": 1}\n".to_owned()
        } else {
            format!("{{\"prompt\": \"{}\", \"completion\": \"yes\"}}\n", "word ".repeat(words))
        };
        let mut fixture = Fixture::new(DataFormat::PromptCompletion, rows.iter().map(row).collect::<Vec<_>>().concat());
        fixture = fixture.limit(limit, [OnTooLong::Drop, OnTooLong::Truncate][too_long]);
        fixture.recipe.on_bad_row = OnBadRow::Drop;
        let (mut bad, mut fates) = (0, Vec::new());
        let recipe = (&fixture.recipe, &fixture.head);
        survey(recipe, Some(&tokenizer()), LIMITS, (&fixture.recipe.train, true), &mut |row| {
            match row.sample {
                Ok(sample) => fates.push(sample.fate),
                Err(_) => bad += 1,
            }
            Ok::<(), DataError>(())
        }).unwrap();
        let of = |wanted: fn(&SampleFate) -> bool| fates.iter().filter(|fate| wanted(fate)).count();
        let used = of(|fate| matches!(fate, SampleFate::Whole | SampleFate::Cut(_)));
        prop_assert_eq!(bad + fates.len(), rows.len());
        prop_assert_eq!(bad, rows.iter().filter(|row| row.1).count());
        if let Ok(splits) = fixture.open() {
            let report = &splits.report.files[0];
            prop_assert_eq!((report.rows, report.bad, splits.train.len()), (rows.len(), bad, used));
            prop_assert_eq!(report.bad + report.dropped + splits.train.len(), report.rows);
            prop_assert_eq!((report.cut, report.uncuttable), (of(|fate| matches!(fate, SampleFate::Cut(_))), of(|fate| *fate == SampleFate::NothingToCut)));
        } else {
            prop_assert_eq!(used, 0);
        }
    }
}
