//! `Recipe::import`: configurations of Axolotl and LLaMA-Factory as their projects show them, and what is no such thing.

use std::fs;
use std::path::{Path, PathBuf};

use insta::assert_snapshot;
use kvtune::data::formats;
use kvtune::recipe::{Recipe, know_formats};
use kvtune::units::Fault;
use tempfile::TempDir;

use super::Told;

fn imported(name: &str) -> String {
    know_formats(formats());
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/other-trainers").join(name);
    let (text, refused) = Recipe::import(&path, &[]).unwrap();
    assert!(refused.is_none(), "{refused:?}");
    text.replace(&path.display().to_string(), name)
}

fn of_text(yaml: &str) -> Result<String, Fault> {
    know_formats(formats());
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("a.yaml");
    fs::write(&path, yaml).unwrap();
    let (text, refused) = Recipe::import(&path, &[])?;
    assert!(refused.is_none(), "{yaml}: {refused:?}");
    Ok(text)
}

#[test]
fn axolotl() {
    assert_snapshot!(imported("axolotl.yaml"), @r#"
    # Made of Axolotl's `axolotl.yaml` by `kvtune init --from`. What is not written has kvtune's default.
    # Paths begin at this file's folder. A data set or a model of the Hub is to be downloaded: `hf download NAME --local-dir DIR`.
    # All entries stay in the cache, as there; `kvtune init --model DIR --data FILE` proposes a cache that evicts.
    # not carried over: model_type = "LlamaForCausalLM": `config.json` says it
    # not carried over: tokenizer_type = "AutoTokenizer": a recipe has no such key
    # not carried over: trust_remote_code = true: a model's own code is never run
    # not carried over: datasets[0].split = "train[:5%]": all rows of the files are read
    # not carried over: dataset_prepared_path = "last_run_prepared": a recipe has no such key
    # not carried over: sample_packing = true: leave it out: sequences of similar length share a batch, those that end leave it, and nothing is computed for pads; `train.max_tokens_per_batch` has many short ones run together
    # not carried over: pad_to_sequence_len = true: nothing is computed for pads
    # not carried over: wandb_project = "mine": every run writes `metrics.jsonl` and TensorBoard events
    # not carried over: wandb_name = "mine": every run writes `metrics.jsonl` and TensorBoard events
    # not carried over: gradient_checkpointing = true: `gradient_checkpointing` is left out: the tables `[kv_cache]` and `[grad]` say what is recomputed
    # not carried over: flash_attention = true: `flash_attention` is left out: kvtune chooses its attention kernels by the device
    # not carried over: loss_watchdog_patience = 3: a recipe has no such key
    # not carried over: evals_per_epoch = 4: `eval.interval` counts steps
    # not carried over: saves_per_epoch = 1: `checkpoint.save_interval` counts steps
    # not carried over: special_tokens = {"pad_token":"<|end_of_text|>"}: a recipe has no such key
    # not carried over: chat_template = "llama3": the model's own chat template is used; `data.chat_template` names a file
    # off or empty there, and left out: load_in_8bit, lora_model_dir, eval_sample_packing, wandb_entity, resume_from_checkpoint

    output_dir = "./outputs/lora-out"

    [model]
    path = "NousResearch/Llama-3.2-1B"
    quantize = "nf4-double"
    dtype = "bf16"
    allow_tf32 = false

    [lora]
    r = 16
    alpha = 32
    dropout = 0.05
    target_modules = "all-linear"
    modules_to_save = ["embed_tokens", "lm_head"]

    [data]
    format = "alpaca"
    train = ["teknium/GPT4-LLM-Cleaned", "data/own.jsonl"]
    validation_fraction = 0.1
    max_seq_length = 2048
    train_on_prompt = false
    on_too_long = "drop"

    [kv_cache]
    policy = "dense"
    storage = "growing"

    [train]
    weights = "adapter"
    gradient_accumulation_steps = 2
    micro_batch_size = 2
    epochs = 1
    max_loss = 5.0

    [optimizer]
    name = "adamw_8bit"
    schedule = "cosine"
    learning_rate = 0.0002
    warmup_steps = 10
    weight_decay = 0.0

    [log]
    interval = 1
    "#);
}

#[test]
fn llama_factory() {
    assert_snapshot!(imported("llama-factory.yaml"), @r#"
    # Made of LLaMA-Factory's `llama-factory.yaml` by `kvtune init --from`. What is not written has kvtune's default.
    # Paths begin at this file's folder. A data set or a model of the Hub is to be downloaded: `hf download NAME --local-dir DIR`.
    # All entries stay in the cache, as there; `kvtune init --model DIR --data FILE` proposes a cache that evicts.
    # not carried over: trust_remote_code = true: a model's own code is never run
    # not carried over: dataset = "identity,alpaca_en_demo": `dataset_info.json` says which files these are: see whether the paths below are theirs
    # not carried over: template = "llama3": the model's own chat template is used; `data.chat_template` names another
    # not carried over: max_samples = 1000: a recipe has no such key
    # not carried over: preprocessing_num_workers = 16: a recipe has no such key
    # not carried over: dataloader_num_workers = 4: a recipe has no such key
    # not carried over: plot_loss = true: a recipe has no such key
    # not carried over: overwrite_output_dir = true: a recipe has no such key
    # not carried over: report_to = "none": leave it out: every run writes `metrics.jsonl` and TensorBoard events
    # not carried over: ddp_timeout = 180000000: a recipe has no such key
    # not carried over: eval_strategy = "steps": `eval_strategy` is left out: a validation comes every `eval.interval` steps
    # off or empty there, and left out: save_only_model, resume_from_checkpoint

    output_dir = "saves/llama3-8b/lora/sft"

    [model]
    path = "meta-llama/Meta-Llama-3-8B-Instruct"
    dtype = "bf16"

    [lora]
    r = 8
    target_modules = ["q_proj", "v_proj"]
    alpha = 16

    [data]
    train = ["data/identity.json", "data/alpaca_en_demo.json"]
    max_seq_length = 2048
    validation_fraction = 0.1
    on_too_long = "truncate"

    [kv_cache]
    policy = "dense"
    storage = "growing"

    [train]
    micro_batch_size = 1
    gradient_accumulation_steps = 8
    epochs = 3.0

    [optimizer]
    learning_rate = 0.0001
    schedule = "cosine"
    warmup_ratio = 0.1
    weight_decay = 0.0

    [eval]
    micro_batch_size = 1
    interval = 500

    [checkpoint]
    save_interval = 500

    [log]
    interval = 10
    "#);
}

/// Checks that what is made of a YAML has lines that begin so.
fn has(yaml: &str, lines: &[&str]) {
    let text = of_text(yaml).unwrap();
    for line in lines {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line}:\n{text}");
    }
}

fn of_axolotl(more: &str) -> String {
    format!("base_model: m\ndatasets:\n- path: a.jsonl\n{more}\n")
}

#[test]
fn what_contradicts_itself_in_a_recipe_is_carried_over_once() {
    has(
        &of_axolotl("lora_r: 8"),
        &["max_seq_length = 512", "weights = \"all\"", "# not carried over: lora.r = 8: all weights are trained"],
    );
    has(&of_axolotl("adapter: lora\nwarmup_steps: 0\nwarmup_ratio: 0.2"), &["warmup_ratio = 0.2"]);
    has(
        &of_axolotl("adapter: lora\nwarmup_steps: 5\nwarmup_ratio: 0.2"),
        &["warmup_steps = 5", "# not carried over: optimizer.warmup_ratio = 0.2: `warmup_steps` wins"],
    );
    has(
        &of_axolotl("adapter: lora\nval_set_size: 0.1\ntest_datasets:\n- path: b.jsonl"),
        &["validation = [\"b.jsonl\"]", "# not carried over: data.validation_fraction = 0.1: the validation samples"],
    );
    has(
        &of_axolotl("- path: b.jsonl\n  type: completion\n- path: c.jsonl\n  type: alpaca"),
        &[
            "format = \"text\"",
            "# not carried over: datasets[2].type = \"alpaca\"",
            "train = [\"a.jsonl\", \"b.jsonl\", \"c.jsonl\"]",
        ],
    );
    has(
        &of_axolotl("lora_alpha: -3\n\"a\\nb\": \"x\\ny\\x7f\"\noutput_dir: \"c\\nd\""),
        &[
            "# not carried over: lora_alpha = -3: `lora.alpha` must be more than 0",
            "# not carried over: a\\nb = \"x\\ny\\u{7f}\": ",
        ],
    );
    has(
        &of_axolotl(
            "adapter: lora\nadam_beta2: 0.95\nwarmup_steps: 0.1\ncosine_min_lr_ratio: 0.2\noptimizer: paged_adamw_32bit\nrl:",
        ),
        &["betas = [0.9, 0.95]", "warmup_ratio = 0.1", "min_lr_ratio = 0.2", "name = \"adamw\""],
    );
    has(
        "stage: sft\nmodel_name_or_path: m\nquantization_bit: 4\ndouble_quantization: false\n\
         lora_target_parameters: [mlp.experts.down_proj]\nadam_beta1: 0.8",
        &["quantize = \"nf4\"", "target_parameters = [\"mlp.experts.down_proj\"]", "betas = [0.8, 0.999]"],
    );
    has(
        "model_name_or_path: m\nquantization_bit: 4\nquantization_method: hqq",
        &["# not carried over: quantization_bit = 4", "# not carried over: quantization_method = \"hqq\""],
    );
    has("model_name_or_path: m\nquantization_bit: 4\nquantization_method: bnb", &["quantize = \"nf4-double\""]);
    has(
        "stage: pt\nmodel_name_or_path: m\nfinetuning_type: full",
        &[
            "format = \"text\"",
            "weights = \"all\"",
            "train = \"data.jsonl\"",
            "max_seq_length = 2048",
            "epochs = 3",
            "learning_rate = 0.00005",
            "schedule = \"linear\"",
        ],
    );
}

#[test]
fn steps_and_warm_ups_are_those_of_the_other_trainer() {
    has(
        &of_axolotl("adapter: lora\nnum_epochs: 3\nmax_steps: 50\nlr_scheduler: constant\nwarmup_steps: 10"),
        &[
            "max_steps = 50",
            "epochs = 50",
            "# not carried over: train.epochs = 3: `max_steps` wins",
            "# not carried over: warmup_steps = 10: `constant` there",
            "warmup_ratio = 0.0",
        ],
    );
    has(&of_axolotl("adapter: lora\nlr_scheduler: constant_with_warmup\nwarmup_steps: 10"), &["warmup_steps = 10"]);
}

#[test]
fn what_is_no_configuration_or_a_bomb_is_refused_at_once() {
    let bomb = (0..9).map(|i| format!("a{}: &a{} [{}]\n", i + 1, i + 1, vec![format!("*a{i}"); 9].join(", ")));
    let bomb = format!("base_model: m\na0: &a0 x\n{}", bomb.collect::<String>());
    for (yaml, words) in [
        (bomb.as_str(), "not valid YAML"),
        (&format!("base_model: {}", "[".repeat(100_000)), "not valid YAML"),
        (&format!("base_model: {}m{}", "[".repeat(40), "]".repeat(40)), "not valid YAML"),
        ("base_model: m\nbase_model: n", "not valid YAML"),
        ("base_model: [m", "not valid YAML"),
        ("- base_model", "expected keys and values"),
        ("", "expected keys and values"),
        ("base_model: m\nrl: dpo", "`rl: dpo` is a kind of training that kvtune does not have"),
        ("base_model: m\nreward_model: true", "`reward_model: true` is a kind"),
        ("base_model: m\nadapter: llama-adapter", "`adapter: llama-adapter` is a kind"),
        ("model_name_or_path: m\nstage: kto", "`stage: kto` is a kind"),
        ("model_name_or_path: m\nfinetuning_type: oft", "`finetuning_type: oft` is a kind"),
        ("model: m", "neither `base_model` of Axolotl nor `model_name_or_path`"),
    ] {
        let error = of_text(yaml).expect_err(words);
        assert!(error.message().contains(words) && error.hint().is_some(), "{words}: {error}");
    }
    let error = Recipe::import(Path::new("/nowhere/a.yaml"), &[]).unwrap_err();
    assert!(error.to_string().contains("can"), "{error}");
}
