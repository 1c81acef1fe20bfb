//! A step is the same whatever micro-batches its samples come in.

use super::workshop::{Left, Workshop};

#[test]
fn four_at_once_are_one_four_times() {
    // Four samples are one step of each epoch, so every step has the same samples in all three runs, in different company.
    let workshop = Workshop::new(4);
    let set = |micro, accumulation| {
        [micro, accumulation, "train.max_steps=3", "data.order=shortest_first", "checkpoint.save_interval=3"]
    };
    let whole = workshop.finished("whole", &set("train.micro_batch_size=4", "train.gradient_accumulation_steps=1"));
    let shared = [
        ("halves", set("train.micro_batch_size=2", "train.gradient_accumulation_steps=2")),
        ("thirds", set("train.micro_batch_size=3", "train.gradient_accumulation_steps=2")),
        // Two batches of two sequences and one of one, or the like: of unequal numbers of targets.
        ("tokens", set("train.max_tokens_per_batch=60", "train.gradient_accumulation_steps=4")),
        ("quarters", set("train.micro_batch_size=1", "train.gradient_accumulation_steps=4")),
    ];
    for (run, set) in shared {
        same(&workshop, ("whole", &whole), (run, &workshop.finished(run, &set)));
    }
    let by_sequence = |run, micro, accumulation| {
        workshop.finished(run, &[&set(micro, accumulation)[..], &["train.loss_mean=sequences", "model.dtype=f64"]].concat())
    };
    let of_whole = by_sequence("means", "train.micro_batch_size=4", "train.gradient_accumulation_steps=1");
    let of_thirds = by_sequence("means of thirds", "train.micro_batch_size=3", "train.gradient_accumulation_steps=2");
    same(&workshop, ("means", &of_whole), ("means of thirds", &of_thirds));
    assert!(workshop.difference("means", "means of thirds") < 1e-12);
    let [by_sequence, by_token] = [&of_whole, &whole].map(|left| left.metrics[1]["loss"].as_f64().unwrap());
    assert!((by_sequence - by_token).abs() > 1e-4, "{by_sequence} and {by_token}");
}

fn same(workshop: &Workshop, (whole, expected): (&str, &Left), (run, found): (&str, &Left)) {
    let difference = workshop.difference(whole, run);
    assert!(difference <= 1e-5, "{run}: {difference:e}");
    for (a, b) in expected.metrics.iter().zip(&found.metrics).skip(1) {
        assert_eq!((&a["step"], &a["tokens"], &a["targets"]), (&b["step"], &b["tokens"], &b["targets"]));
        for key in ["loss", "grad_norm"] {
            let (a, b) = (a[key].as_f64().unwrap(), b[key].as_f64().unwrap());
            assert!((a - b).abs() <= 1e-6 * a, "{run}, {key}: {a} and {b}");
        }
    }
}
