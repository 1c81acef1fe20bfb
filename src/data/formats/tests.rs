//! What rows of each format say, and how rows are counted.

use serde_json::{Value, json};

use crate::data::faults::RowFault;
use crate::data::fixtures::{Fixture, tokenizer};
use crate::data::{SplitName, Targets, survey};
use crate::recipe::{Boundary, HelmetFamily, OnBadRow, OnTooLong, TemplateChoice, TrainOn, ValidationSource};
use proptest::prelude::*;

pub(super) fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect::<Vec<_>>().concat()
}

/// The text of the first sample, its prompt, and its answers; the format is told from the fields.
fn told(row: &Value, family: Option<HelmetFamily>) -> (String, String, Vec<String>) {
    let mut fixture = Fixture::new("helmet", lines(std::slice::from_ref(row)));
    fixture.recipe.family = family;
    fixture.recipe.format = family.map(|_| "helmet".to_owned());
    let splits = fixture.open().unwrap();
    assert_eq!(splits.files[0].source.told.is_some(), family.is_none());
    let question = splits.train.question(0).unwrap();
    let inputs = &splits.train.batch(&[0]).unwrap().sequences[0].inputs;
    let text = |ids: &[u32]| tokenizer().decode(ids).unwrap();
    (text(&question.prompt), text(&inputs[question.prompt.len()..]), question.references)
}

#[test]
fn all_of_a_text_is_trained() {
    let mut fixture = Fixture::new("text", lines(&[json!({"text": "the cache holds"}), json!({"text": "key"})]));
    fixture.recipe.format = None;
    let splits = fixture.open().unwrap();
    assert_eq!(
        splits.files[0].source.told.as_deref().map(|told| told.starts_with("`text` by the fields `text` of ")),
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
    let labelled = Fixture::new("text", lines(&[json!({"text": "a", "label": "C"}), json!({"text": "a", "label": 1})]));
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
    assert_eq!(told(&ranked, None).2, [r#"{"7":0,"12":2}"#], "the labels of the passages");
}

/// What is about long texts: HELMET's wording begins and ends so.
#[test]
fn helmets_long_texts_are_messages_where_there_is_a_template() {
    use HelmetFamily::{InfbenchChoice, InfbenchQa, InfbenchSum, MultiLexsum, NarrativeQa};
    let row = json!({"context": "{c}", "question": "q?", "options": ["w", "x", "y", "z"], "answer": ["B", "x"]});
    let story = "You are given a story";
    for (family, begin, user_end, cue) in [
        (
            NarrativeQa,
            "You are given a story, which can be either a novel or a movie script, and a question. ",
            "if possible.\n\n{c}\n\nQuestion: q?",
            "\nAnswer:",
        ),
        (InfbenchQa, story, "if possible.\n\n{c}\n\nQuestion: q?", "\n\nAnswer:"),
        (InfbenchChoice, story, "anything else.\n\n{c}\n\nQuestion: q?\nOptions:\nA. w\nB. x\nC. y\nD. z", "\n\nAnswer:"),
        (InfbenchSum, "You are given a book", "or commentary.\n\n{c}\n\nNow summarize the book.", "\n\nSummary:"),
        (
            MultiLexsum,
            "You are given the legal documents",
            "of the case.\n\nLegal documents:\n{c}\n\nNow please summarize the case.",
            "\n\nSummary:",
        ),
    ] {
        let (prompt, reply, references) = told(&row, Some(family));
        assert!(prompt.starts_with(begin) && prompt.ends_with(&format!("{user_end}{cue}")), "{prompt}");
        assert_eq!((&reply[..], references), (" B", vec!["B".to_owned(), "x".to_owned()]));
        let mut fixture = Fixture::new("helmet", lines(std::slice::from_ref(&row)));
        fixture.recipe.family = Some(family);
        fixture.recipe.chat.chat_template = Some(crate::recipe::TemplateChoice(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
                .to_owned(),
        ));
        let asked = tokenizer().decode(&fixture.open().unwrap().train.question(0).unwrap().prompt).unwrap();
        assert!(asked.starts_with(&format!("<user>{begin}")) && asked.ends_with(&format!("{user_end}<assistant>")), "{asked}");
        let mut with_demos = row.clone();
        with_demos["demos"] = json!([{"a": 1}]);
        fixture.write("train.jsonl", lines(&[with_demos]));
        assert!(fixture.error().contains(&format!("field `demos`: expected none of the family `{family}`")));
    }
}

#[test]
fn a_format_is_told_from_all_first_rows_or_not_at_all() {
    let error = |rows: &[Value]| {
        let mut fixture = Fixture::new("text", lines(rows));
        fixture.recipe.format = None;
        fixture.error()
    };
    let unknown = "`train.jsonl:1`: cannot detect `data.format`: found the fields `a`, `b`";
    assert_eq!(error(&[json!({"a": 1, "b": 2})]), unknown);
    let mixed = error(&[json!({"text": "a"}), json!({"prompt": "a", "completion": "b"})]);
    assert!(mixed.starts_with("`train.jsonl:2`: ") && mixed.contains("`prompt-completion` by the fields"), "{mixed}");
    assert!(error(&[]).ends_with("holds no samples, expected at least 1"));
}

#[test]
fn what_contradicts_a_format_is_told_of_one_that_the_rows_tell() {
    let of = |row: Value| {
        let mut fixture = Fixture::new("text", lines(&[row]));
        fixture.recipe.format = None;
        fixture
    };
    let mut tokens = of(json!({"input_ids": [1, 2], "labels": [1, 2]}));
    tokens.recipe.chat.train_on = Some(TrainOn::All);
    assert!(tokens.error().starts_with("`data.train_on` says nothing where `data.format` is `tokens`"));
    let mut text = of(json!({"text": "a"}));
    text.recipe.chat.train_on = Some(TrainOn::Last);
    assert!(text.error().ends_with("means what an assistant says, and `text` has no messages"));
    text.recipe.chat = crate::recipe::ChatRecipe { boundary: Boundary::Joined, ..Default::default() };
    assert!(text.error().starts_with("`data.boundary` says nothing where `data.format` is `text`"));
    text.recipe.chat.boundary = Boundary::Separate;
    text.recipe.family = Some(HelmetFamily::Icl);
    assert_eq!(text.error(), "`data.family` says nothing where `data.format` is not `helmet`");
    let mut pair = of(json!({"prompt": "a", "completion": "b"}));
    pair.recipe.chat.train_on = Some(TrainOn::Assistant);
    assert!(pair.error().ends_with("expected messages, of which `data.train_on = \"assistant\"` speaks, found a text"));
}

#[test]
fn a_text_among_conversations_is_trained_whole() {
    let mut fixture = Fixture::new("messages", lines(&[json!({"text": "the cache"})]));
    let sequence = fixture.open().unwrap().train.batch(&[0]).unwrap();
    assert_eq!(
        (&sequence.sequences[0].inputs, sequence.num_targets()),
        (&tokenizer().encode("the cache").unwrap(), sequence.num_tokens())
    );
    fixture.recipe.chat.train_on = Some(TrainOn::Assistant);
    assert!(fixture.error().contains("field `text`: expected messages"));
}

#[test]
fn bad_rows_are_listed_or_left_out() {
    let rows: Vec<Value> = (0..30).map(|i| if i % 2 == 0 { json!({"text": "a b c"}) } else { json!({"text": i}) }).collect();
    let mut fixture = Fixture::new("text", lines(&rows));
    let error = fixture.error();
    assert!(
        error.starts_with("15 of 30 rows of the data files cannot be read; the first 10 are\n  `train.jsonl:2`: "),
        "{error}"
    );
    assert_eq!(error.lines().count(), 11);
    fixture.recipe.on_bad_row = OnBadRow::Drop;
    let splits = fixture.open().unwrap();
    assert_eq!((splits.train.len(), splits.files[0].bad, splits.files[0].rows), (15, 15, 30));
    fixture.write("train.jsonl", "{\n\n{");
    assert!(fixture.error().starts_with("2 of 2 rows of the data files cannot be read:\n  `train.jsonl:1` is not JSON"));
}

/// A row of a random data set: how many words its prompt has, and what is wrong with it.
type RandomRow = (usize, usize);

fn random_row(&(words, kind): &RandomRow) -> String {
    let words = "word ".repeat(words);
    match kind {
        0 => "{\"prompt\": 1}\n".to_owned(),
        1 => "no JSON\n".to_owned(),
        2 => format!("{{\"prompt\": \"\", \"completion\": \"{words}a\"}}\n"),
        3 => format!("{{\"prompt\": \"a\", \"completion\": \"{words}\"}}\n"),
        _ => format!("{{\"prompt\": \"{words}\", \"completion\": \"yes\"}}\n"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn every_row_is_counted_once(
        rows in prop::collection::vec((0..40_usize, 0..9_usize), 1..30), limit in 4..60_usize, settings in (0..4_usize, any::<bool>()),
        (fraction, overlap, is_all) in (0.0..0.5_f64, 0..2_usize, any::<bool>()),
    ) {
        let (too_long, is_dropped) = settings;
        let mut fixture = Fixture::new("prompt-completion", rows.iter().map(random_row).collect::<Vec<_>>().concat());
        fixture = fixture.limit(limit, OnTooLong::ALL[too_long]);
        fixture.recipe.on_bad_row = if is_dropped { OnBadRow::Drop } else { OnBadRow::Error };
        fixture.recipe.validation = ValidationSource::Fraction(fraction);
        fixture.recipe.split_overlap = if OnTooLong::ALL[too_long] == OnTooLong::Split { overlap } else { 0 };
        fixture.recipe.train_on_prompt = is_all;
        let (mut bad, mut too_long, mut outcomes) = (0, 0, Vec::new());
        let survey = survey(&fixture.request(Some(&tokenizer())), SplitName::Train, false, &mut |row| {
            match &row.sample {
                Ok(sample) => outcomes.push(sample.outcome.clone()),
                Err(error) if error.payload::<RowFault>().is_some_and(|row| row.is_too_long) => too_long += 1,
                Err(_) => bad += 1,
            }
            Ok(())
        }).unwrap();
        prop_assert_eq!(bad + too_long + outcomes.len(), rows.len());
        prop_assert_eq!(bad, rows.iter().filter(|row| row.1 < 2).count());
        prop_assert_eq!((survey.rows(), survey.bad(), survey.too_long), (rows.len(), bad, too_long));
        prop_assert_eq!(survey.samples.used(), outcomes.iter().filter(|outcome| outcome.is_used()).count());
        prop_assert_eq!(survey.samples.used() + survey.samples.left_out() + bad + too_long, rows.len());
        prop_assert_eq!(survey.lengths.iter().sum::<usize>(), outcomes.len());
        match fixture.open() {
            Ok(splits) => {
                let report = &splits.files[0];
                prop_assert!(too_long == 0 && (bad == 0 || is_dropped));
                prop_assert_eq!((report.rows, report.bad, &report.samples), (rows.len(), bad, &survey.samples));
                prop_assert_eq!(report.bad + report.samples.left_out() + report.samples.used(), report.rows);
                let run = splits.train.len() + splits.validation.as_ref().map_or(0, crate::data::Dataset::len);
                prop_assert_eq!(report.samples.used() - report.samples.split + report.samples.windows, run);
                prop_assert_eq!(splits.rest.as_ref().map_or(0, crate::data::Dataset::len), report.samples.left_out());
                prop_assert_eq!(survey.duplicates, report.duplicates);
            }
            Err(error) => prop_assert_eq!(error.to_string(), survey.verdict().unwrap_err().to_string()),
        }
    }
}

#[test]
fn columns_that_people_have_are_the_fields_of_a_format() {
    let told = |rows: &[Value]| {
        let mut fixture = Fixture::new("text", lines(rows));
        fixture.recipe.format = None;
        fixture.recipe.chat.chat_template = Some(TemplateChoice("{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}".to_owned()));
        let splits = fixture.open().map_err(|error| (error.to_string(), error.hint().unwrap_or_default()))?;
        let inputs = &splits.train.batch(&[0]).unwrap().sequences[0].inputs;
        Ok::<_, (String, String)>((splits.files[0].source.told.clone().unwrap(), tokenizer().decode(inputs).unwrap()))
    };
    let pairs =
        [("question", "answer"), ("instruction", "response"), ("input", "output"), ("query", "response"), ("prompt", "answer")];
    for (prompt, completion) in pairs {
        let (format, text) = told(&[json!({"id": 7, prompt: "the cache", completion: " holds", "level": "easy"})]).unwrap();
        assert!(
            format.starts_with("`prompt-completion` by the columns ") && format.ends_with("; not read: `id`, `level`"),
            "{format}"
        );
        assert_eq!(text, "the cache holds");
    }
    let turns = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]);
    assert_eq!(told(&[json!({"conversation": turns})]).unwrap().1, "user\nqassistant\na");
    let dolly = json!({"instruction": "i", "context": "the text", "response": "a", "category": "x"});
    assert_eq!(told(&[dolly]).unwrap().1, "user\ni\nthe textassistant\na");
    // Where another column says something, nothing is guessed: the table is there to paste.
    let first = json!({"question": "q", "answer": "a", "context": ""});
    for rows in [
        vec![json!({"question": "q", "answer": "a", "context": "some words"})],
        vec![first, json!({"question": "q", "answer": "a", "context": "some words"})],
        vec![json!({"question": "q", "answer": "a", "context": "北京是中国的首都，人口超过两千万。"})],
    ] {
        let (error, hint) = told(&rows).unwrap_err();
        assert!(error.contains("cannot detect `data.format`: found the fields `question`, `answer`, `context`"), "{error}");
        assert!(
            hint.contains("format = \"prompt-completion\"\ncolumns = { prompt = \"question\", completion = \"answer\" }"),
            "{hint}"
        );
    }
    for (row, table) in [
        (
            json!({"frage": "a b", "n": 3, "antwort": "c d"}),
            "format = \"prompt-completion\"\ncolumns = { prompt = \"frage\", completion = \"antwort\" }",
        ),
        (json!({"body": "a b", "n": 3}), "format = \"text\"\ncolumns = { text = \"body\" }"),
        (json!({"chat": turns}), "format = \"messages\"\ncolumns = { messages = \"chat\" }"),
        (json!({"turns": [{"from": "human", "value": "q"}]}), "format = \"sharegpt\"\ncolumns = { conversations = \"turns\" }"),
        (
            json!({"prompt": "a b", "chosen": "c d", "rejected": "e f"}),
            "columns = { prompt = \"prompt\", completion = \"chosen\" }",
        ),
    ] {
        let (_, hint) = told(std::slice::from_ref(&row)).unwrap_err();
        assert!(hint.contains(table) && hint.contains("[data]\ntrain = \""), "{row}: {hint}");
    }
}

#[test]
fn nothing_is_left_out_without_a_word() {
    let asked = json!({"role": "user", "content": "q"});
    let answered = json!({"role": "assistant", "content": "a"});
    let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x=1"}}]});
    let image =
        json!({"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "x"}}]});
    for (format, row, error, hint) in [
        ("messages", json!({"messages": [image, answered]}), "a part of `content` is `image_url`", "on_bad_row"),
        (
            "messages",
            json!({"messages": [asked, answered], "images": ["x"]}),
            "field `images`: expected no pictures",
            "without this column",
        ),
        (
            "messages",
            json!({"messages": [asked, call]}),
            "`arguments` of a tool call is a text that is not JSON",
            "correct the messages",
        ),
        ("messages", json!({"messages": [asked]}), "none to predict: no message of the assistant is trained", "data.train_on"),
        (
            "tokens",
            json!({"input_ids": [1, 2], "labels": [1, -100]}),
            "2 tokens and none to predict: `labels` is -100 behind the first token",
            "`labels`",
        ),
        ("text", json!({"text": ""}), "field `text`: expected a text to train on, found an empty one", "correct the field"),
    ] {
        let mut fixture = Fixture::new(format, lines(std::slice::from_ref(&row)));
        fixture.recipe.chat.chat_template =
            Some(TemplateChoice("{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}".to_owned()));
        let found = fixture.open().unwrap_err();
        assert!(found.to_string().contains(error) && found.hint().unwrap().contains(hint), "{found}: {:?}", found.hint());
    }
    let empty = json!({"messages": [asked, answered], "images": [], "audio": null, "video": ""});
    assert!(Fixture::new("messages", lines(&[empty])).open().is_err_and(|error| error.to_string().contains("chat template")));
}

#[test]
fn empty_prompts_and_completions_are_counted() {
    let rows = [("", "a"), ("a", ""), (" ", "b"), ("a", "b")]
        .map(|(prompt, completion)| json!({"prompt": prompt, "completion": completion}));
    let mut fixture = Fixture::new("prompt-completion", lines(&rows));
    let warnings = [
        "2 rows with an empty `prompt`, whose completion is trained as the beginning of a text",
        "1 row with an empty `completion`: only the end of the text is trained",
    ];
    // Read anew, from the token cache, and divided into two parts.
    for validation in [0.0, 0.0, 0.5] {
        fixture.recipe.validation = ValidationSource::Fraction(validation);
        assert_eq!(fixture.open().unwrap().warnings, warnings);
    }
}
