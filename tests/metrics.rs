//! Metrics beside the programs that they come from: what HELMET, `rouge_score`, `rouge`, NLTK, RULER, `LongBench`, `InfiniteBench` and
//! `trec_eval` gave for the same texts.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use kvtune::metrics::{LongBenchV2, Metric, after_cue, extract_choice, ndcg, normalize, parse_ranking, stem};
use serde::Deserialize;
use serde::de::DeserializeOwned;

fn text(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/metrics").join(name)).unwrap()
}

fn rows<T: DeserializeOwned>(name: &str) -> Vec<T> {
    text(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[derive(Deserialize)]
struct Columns {
    metrics: Vec<String>,
    after_cue: Vec<String>,
}

#[derive(Deserialize)]
struct Row {
    prediction: String,
    references: Vec<String>,
    scores: Vec<f64>,
    after_cue: Vec<f64>,
    normalized: String,
    parsed: String,
    ranking: Vec<String>,
    retrieval: Option<f64>,
}

#[test]
fn answers() {
    let text = text("answers.jsonl");
    let (columns, rows) = text.split_once('\n').unwrap();
    let columns: Columns = serde_json::from_str(columns).unwrap();
    let rows: Vec<Row> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((rows.len(), columns.metrics.len(), columns.after_cue.len()), (96, 38, 7));
    // The two that stand elsewhere: `retrieval` where a reference names a paragraph, `longbench_v2` beside its replies, `ndcg_10` beside labels.
    assert_eq!(Metric::names().len(), columns.metrics.len() + 3);
    for row in &rows {
        let score = |name: &str, prediction: &str| name.parse::<Metric>().unwrap().score(prediction, &row.references).unwrap();
        let near = |name: &str, found: f64, expected: f64| {
            assert!(
                (found - expected).abs() <= 1e-9,
                "{name} of {:?} beside {:?}: {found}, {expected}",
                row.prediction,
                row.references
            );
        };
        for (name, expected) in columns.metrics.iter().zip(&row.scores) {
            near(name, score(name, &row.prediction), *expected);
        }
        let parsed = after_cue(&row.prediction, "Answer:");
        assert_eq!((parsed, normalize(&row.prediction)), (row.parsed.as_str(), row.normalized.clone()));
        assert_eq!(parse_ranking(&row.prediction), row.ranking);
        for (name, expected) in columns.after_cue.iter().zip(&row.after_cue) {
            near(name, score(name, &row.prediction).max(score(name, parsed)), *expected);
        }
        if let Some(expected) = row.retrieval {
            near("retrieval", score("retrieval", &row.prediction), expected);
        }
    }
    assert_eq!(rows.iter().filter(|row| row.retrieval.is_some()).count(), 2);
}

#[test]
fn stems() {
    let text = text("stems.tsv");
    let pairs: Vec<_> = text.lines().map(|line| line.split_once('\t').unwrap()).collect();
    assert_eq!(pairs.len(), 816);
    for (word, expected) in pairs {
        assert_eq!(stem(word), expected, "{word}");
    }
}

#[derive(Deserialize)]
struct RulerTable {
    predictions: Vec<String>,
    references: Vec<Vec<String>>,
    string_match_all: f64,
    string_match_part: f64,
}

/// RULER prints the mean in per cent with two decimals.
#[test]
fn ruler_tables() {
    for table in rows::<RulerTable>("ruler-tables.jsonl") {
        for (metric, expected) in [(Metric::RulerAll, table.string_match_all), (Metric::RulerPart, table.string_match_part)] {
            let scores =
                table.predictions.iter().zip(&table.references).map(|(text, references)| metric.score(text, references).unwrap());
            let mean = scores.sum::<f64>() / table.predictions.len() as f64;
            assert_eq!(format!("{:.2}", 100.0 * mean), format!("{expected:.2}"));
        }
    }
}

#[derive(Deserialize)]
struct Reply {
    response: String,
    pred: Option<char>,
}

#[test]
fn longbench_v2_choices() {
    let replies: Vec<Reply> = rows("longbench-v2-choices.jsonl");
    assert_eq!(replies.len(), 36);
    for reply in replies {
        assert_eq!(extract_choice(&reply.response), reply.pred, "{:?}", reply.response);
        let score = |letter: char| Metric::LongBenchV2.score(&reply.response, &[letter.to_string()]).unwrap();
        for letter in 'A'..='D' {
            assert_eq!(score(letter) > 0.0, reply.pred == Some(letter), "{:?}", reply.response);
        }
    }
}

#[derive(Deserialize)]
struct AccuracyTable {
    compensated: bool,
    line: String,
    rows: Vec<(String, String, String, String, Option<char>)>,
}

#[test]
fn longbench_v2_tables() {
    let tables: Vec<AccuracyTable> = rows("longbench-v2-tables.jsonl");
    assert_eq!(tables.len(), 3);
    for expected in tables {
        let mut table = LongBenchV2::default();
        for (difficulty, length, domain, answer, choice) in &expected.rows {
            let credit = match choice {
                Some(choice) if answer.chars().eq([*choice]) => 1.0,
                None if expected.compensated => 0.25,
                _ => 0.0,
            };
            table.add_credit([difficulty, length, domain], credit);
        }
        assert_eq!(table.cells().join("\t"), expected.line);
        assert_eq!(table.by_domain.values().map(|group| group.samples).sum::<usize>(), expected.rows.len());
    }
}

#[derive(Deserialize)]
struct Ranked {
    output: String,
    labels: BTreeMap<String, u32>,
    scores: BTreeMap<String, f64>,
}

/// Rounded to five decimals there.
#[test]
fn rankings() {
    for row in rows::<Ranked>("rankings.jsonl") {
        let ranking = parse_ranking(&row.output);
        let labels = [serde_json::to_string(&row.labels).unwrap()];
        assert_eq!(Metric::Ndcg10.score(&row.output, &labels), Ok(ndcg(&ranking, &row.labels, 10)));
        // The other figures there are of `trec_eval`'s that kvtune does not have.
        for (name, expected) in &row.scores {
            let Some(k) = name.strip_prefix("NDCG@") else { continue };
            let found = ndcg(&ranking, &row.labels, k.parse().unwrap());
            assert!((found - expected).abs() <= 5.001e-6, "{name} of {:?}: {found}, expected {expected}", row.output);
        }
    }
}
