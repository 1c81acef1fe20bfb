//! `--profile-memory` of runs: the heaviest micro-batch of all steps by part, on the terminal and in `summary.md`.

use super::place::{Place, Said};

/// Of the longest row.
const TOKENS: i64 = 1500;

/// Two micro-batches in each of three steps, with a validation after each.
const SETS: [&str; 7] = [
    "train.gradient_accumulation_steps=2",
    "train.epochs=3",
    "data.validation_fraction=0.3",
    "eval.interval=1",
    "train.micro_batch_size=1",
    "grad.layers_per_cell=1",
    // With all graphs there would be no stores.
    "grad.keep_graph=none",
];

fn finetune(place: &Place, more: &[&str]) -> Said {
    let words = ["finetune-lora", "--device", "cpu", "--recipe", "recipe.toml", "--out", "run"];
    let sets: Vec<&str> = SETS.iter().flat_map(|set| ["--set", set]).collect();
    place.run(&[&words[..], &sets, more].concat())
}

fn summary(place: &Place) -> String {
    String::from_utf8(place.read("run/summary.md")).unwrap()
}

/// The words above the table, and its rows; the last one is the measured peak.
fn told(text: &str) -> (&str, Vec<(&str, i64)>) {
    let heading = text.lines().find(|line| line.starts_with("most memory (process) of all steps: in step ")).expect(text);
    let table = &text[text.find("| memory at the peak ").expect(text)..];
    let rows = table.lines().skip(2).map_while(|line| {
        let cells: Vec<&str> = line.strip_prefix("| ")?.split('|').map(str::trim).collect();
        Some((cells[0], cells[1].parse().unwrap()))
    });
    (heading, rows.collect())
}

fn check(text: &str, micro_batches: usize) {
    let (heading, rows) = told(text);
    let of = |name: &str| rows.iter().find(|(part, _)| *part == name).unwrap_or_else(|| panic!("{name} in {rows:?}")).1;
    let (measured, parts) = rows.split_last().unwrap();
    assert_eq!(measured.0, "measured peak");
    assert_eq!(parts.iter().map(|(_, bytes)| bytes).sum::<i64>(), measured.1, "{rows:?}");
    // Of what is trained there are two moments, and of the micro-batches before a gradient.
    let trained = of("optimizer state") / 2;
    assert!(trained > 0 && of("weights") > trained, "{rows:?}");
    let is_first = heading.contains(&format!("micro-batch 1 of {micro_batches}"));
    let accumulated = if is_first { 0 } else { trained };
    assert!((accumulated..=accumulated + 2 * trained).contains(&of("gradients")), "{heading}: {rows:?}");
    for part in ["KV cache", "undo log", "layer checkpoints", "activations", "process"] {
        assert!(of(part) > 0, "{part}: {rows:?}");
    }
    assert!(text.contains("most tensors (process) at a time: forward "), "{text}");
    assert!(text.contains("peak of the process outside of steps: "), "{text}");
}

#[test]
fn a_run_tells_its_heaviest_step_and_so_does_its_summary() {
    let place = Place::new();
    let said = finetune(&place, &["--profile-memory"]).done();
    check(&said.out, 2);
    assert!(said.out.trim_end().ends_with("finished: run/final"), "{}", said.out);
    let page = summary(&place);
    check(&page, 2);
    assert_eq!(told(&page), told(&said.out));
    // The peak of the page is that of the process, in steps and outside of them.
    assert!(page.contains("| peak memory ") && page.contains("## Memory by part\n\nmost memory (process)"), "{page}");
}

#[test]
fn what_was_accumulated_has_a_row_of_its_own() {
    let place = Place::new();
    let row = |tokens: i64| {
        let ids: Vec<i64> = (0..tokens).map(|i| 1 + i * 7 % 500).collect();
        format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n")
    };
    place.write("train.jsonl", [row(20), row(TOKENS)].concat());
    // One step: what the allocator kept of it would count as the process' in the next, whichever micro-batch comes first.
    let sets = ["data.validation_fraction=0", "data.order=shortest_first", "train.max_steps=1"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let said = finetune(&place, &[&["--profile-memory"][..], &sets].concat()).done();
    let (heading, _) = told(&said.out);
    assert!(heading.contains("micro-batch 2 of 2, "), "{heading}");
    check(&said.out, 2);
}

#[test]
fn a_resume_tells_its_own_steps_and_none_is_told_unasked() {
    let place = Place::new();
    let said = finetune(&place, &["--set", "train.max_steps=2"]).done();
    assert!(!said.out.contains("memory") && !summary(&place).contains("Memory by part"), "{}", said.out);
    let resume = |more: &[&str]| place.run(&[&["resume", "run", "--device", "cpu", "--profile-memory"], more].concat()).done();
    let said = resume(&["--set", "train.max_steps=4"]);
    check(&said.out, 2);
    let (heading, _) = told(&said.out);
    assert!(heading.contains("in step 3,") || heading.contains("in step 4,"), "{heading}");
    assert_eq!(told(&summary(&place)), told(&said.out));
    // Nothing is left to do, and so nothing to tell.
    assert!(!resume(&[]).out.contains("memory"));
}

#[test]
fn all_weights_are_told_too() {
    let place = Place::new();
    place.edit_recipe("[lora]\nr = 4\nalpha = 8\n", "");
    let words = ["finetune-full", "--device", "cpu", "--recipe", "recipe.toml", "--out", "run", "--profile-memory"];
    let said = place.run(&words).done();
    let (_, rows) = told(&said.out);
    let of = |name: &str| rows.iter().find(|(part, _)| *part == name).unwrap().1;
    let (measured, parts) = rows.split_last().unwrap();
    assert_eq!(parts.iter().map(|(_, bytes)| bytes).sum::<i64>(), measured.1, "{rows:?}");
    assert_eq!(of("optimizer state"), 2 * of("weights"), "{rows:?}");
}

/// Nothing follows the uppermost layer's attention in columns without targets, so that kept graphs are smaller there.
#[test]
fn graphs_of_columns_without_targets_end_at_the_uppermost_attention() {
    let activations = |first_target: usize| {
        let place = Place::new();
        let ids: Vec<i64> = (0..TOKENS).map(|i| 1 + i * 7 % 500).collect();
        let labels: Vec<i64> = ids.iter().enumerate().map(|(at, &id)| if at < first_target { -100 } else { id }).collect();
        let row = format!("{{\"input_ids\": {ids:?}, \"labels\": {labels:?}}}\n");
        place.write("train.jsonl", row.repeat(2));
        let sets = ["data.validation_fraction=0", "train.max_steps=1", "grad.keep_graph=all"];
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let said = finetune(&place, &[&["--profile-memory"][..], &sets].concat()).done();
        let (_, rows) = told(&said.out);
        rows.iter().find(|(part, _)| *part == "activations").unwrap().1
    };
    let (all, answer) = (activations(1), activations(TOKENS as usize - 8));
    assert!(answer < all * 9 / 10, "{answer} of {all}");
}
