#!/bin/sh
# The main job from end to end without anything fetched: a small model with random weights, on documents found on this machine. Fails when a step
# fails, or when training has not lowered the loss on held-out documents. `demo.sh` runs it where the real model cannot be had.
set -eu
cd "$(dirname -- "$0")/.."
# Numbers have a point here, whatever they have at home.
export LC_ALL=C

kvtune=${KVTUNE:-${CARGO_TARGET_DIR:-target}/debug/kvtune}
recipe=recipes/quickstart.toml
demo=data/demo
run=$demo/run
# Plain autograd keeps whole attention matrices: the proof looks at two documents cut to this many tokens (the cache holds 1024).
proof_tokens=${PROOF_TOKENS:-3072}

. .cargo/demo-steps.sh

# One number of the overall score of an evaluation's JSON: `overall loss < FILE`.
overall() {
    tr '{},' '[\n*]' | sed -n "/\"overall\"/,/\"by_length\"/s/^[[:space:]]*\"$1\":[[:space:]]*//p" | head -n 1
}

# Evaluates on held-out documents, shows the table, and keeps the JSON as $demo/NAME.json.
evaluate() {
    name=$1
    shift
    "$kvtune" evaluate "$@" --split validation --set eval.max_batches=4 --format json >"$demo/$name.json"
    printf '%-34s loss %s, perplexity %s, accuracy %s\n' "$name" \
        "$(overall loss <"$demo/$name.json")" "$(overall perplexity <"$demo/$name.json")" "$(overall accuracy <"$demo/$name.json")"
}

rm -rf "$demo"
mkdir -p "$demo"

step 'documents: plain texts that are on this machine, with questions whose answers stand far away'
"${DEMO_DATA:-${CARGO_TARGET_DIR:-target}/debug/examples/demo-data}" --out "$demo"

step 'model: a few million random weights, and a tokenizer trained on the same texts'
"$kvtune" init-model --config data/demo-config.json --tokenizer-from "$demo/corpus.txt" --out "$demo/model" --seed 1
"$kvtune" check --recipe "$recipe"

step 'before training, on held-out documents'
evaluate before-all-tokens --base "$demo/model" --recipe "$recipe" --set data.train_on_prompt=true
evaluate before-answers --base "$demo/model" --recipe "$recipe" --set data.train_on_prompt=false

step "training, to be killed after its first intermediate save"
train_and_kill "$run" "$demo/train.log" "$kvtune" finetune-lora --recipe "$recipe" --out "$run"

step 'resumed from that save, to the end'
"$kvtune" resume "$run"
[ -f "$run/final/adapter_model.safetensors" ] || fail "no $run/final/adapter_model.safetensors"

step 'after training, on held-out documents'
evaluate after-all-tokens "$run" --set data.train_on_prompt=true
evaluate after-answers "$run" --set data.train_on_prompt=false
evaluate after-answers-as-classes "$run" --set data.train_on_prompt=false \
    --set head.kind=seq_classification_on_logits --set 'head.labels=["A", "B", "C", "D"]'

step "proof: tiled gradients against plain autograd, two documents cut to $proof_tokens tokens"
"$kvtune" verify --recipe "$recipe" --samples 2 \
    --set "data.max_seq_length=$proof_tokens" --set data.on_too_long=truncate

step 'before and after in one table, with generated answers'
"$kvtune" evaluate "$demo/model" "$run" --recipe "$recipe" --split validation --limit 2 --answers "$demo/answers.jsonl" --max-new-tokens 24
printf 'the answer to its last question: %s\n' "$(sed -n '$s/.*"prediction":"\([^"]*\)".*/\1/p' "$demo/answers.jsonl")"

step 'the run, and what its caches kept of the longest of two documents'
"$kvtune" inspect "$run"
"$kvtune" evaluate "$run" --limit 2 --replay-log "$demo/log.safetensors" >/dev/null
"$kvtune" inspect --evictions "$demo/log.safetensors" --out "$demo/kept.svg"
"$kvtune" report "$run" --evictions "$demo/log.safetensors"

before=$(overall loss <"$demo/before-all-tokens.json")
after=$(overall loss <"$demo/after-all-tokens.json")
awk -v before="$before" -v after="$after" 'BEGIN { exit !(before + 0 > 0 && after + 0 > 0 && after + 0 < before + 0) }' ||
    fail "the loss over all held-out tokens did not fall: $before before, $after after"
step "done: the loss over all held-out tokens fell from $before to $after; the run is in $run"
