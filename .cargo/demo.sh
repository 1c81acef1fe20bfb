#!/bin/sh
# The main job from end to end on a real model and real prose: fetch both, make documents with facts to be found, train through a policy, be
# killed, resume, prove the gradient, answer questions with and without the adapter. Fails when a step fails, or when training has found no fact more.
set -eu
cd "$(dirname -- "$0")/.."
# Numbers have a point here, whatever they have at home.
export LC_ALL=C

kvtune="${KVTUNE:-${CARGO_TARGET_DIR:-target}/debug/kvtune} --quiet"
real=${DATA:-data/real}
demo=data/demo
run=$demo/run
recipe=recipes/real/needles.toml
model=$real/SmolLM2-135M-Instruct.Q4_1.gguf
slots=160
questions=12

. .cargo/demo-steps.sh

step 'a real model of 135 million weights (SmolLM2, 98 MB), and an FAQ of 3 million tokens'
if ! DATA=$real sh recipes/real/fetch.sh; then
    echo 'demo: they cannot be fetched here (see above): a small model with random weights serves instead'
    exec sh .cargo/demo-small.sh
fi

rm -rf "$demo"
mkdir -p "$demo"
needles() { python3 recipes/real/needles.py --prose "$real/prose" --characters 2200 "$@"; }
needles --sections A,B,C,D,E,F,G,H --rows 64 --seed 1 >"$demo/train.jsonl"
needles --sections I,J --rows $questions --seed 1000 >"$demo/judged.jsonl"
echo "made $(wc -l <"$demo/train.jsonl") documents to train on, and $(wc -l <"$demo/judged.jsonl") from other chapters to judge by; each hides a fact"

# The recipe with the demo's files and cache.
with="--recipe $recipe --set model.path=$model --set data.train=$demo/train.jsonl --set kv_cache.chunk_size=32"

step "training through the policy keydiff with $slots slots, a third of a document; it is killed after its first save"
# shellcheck disable=SC2086  # several words
train_and_kill "$run" "$demo/train.log" $kvtune finetune-lora $with --out "$run" --set kv_cache.cache_length=$slots \
    --set train.max_steps=14 --set train.micro_batch_size=4 --set checkpoint.intermediate_save_interval=4

step 'resumed from that save, to the end'
$kvtune resume "$run" >"$demo/resume.log" 2>&1 || { cat "$demo/resume.log"; fail 'it does not resume'; }
sed -n 's/.*"step":\([0-9]*\),.*"loss":\([0-9.]*\),"accuracy.*/step \1: loss \2/p' "$run/metrics.jsonl" | awk 'NR == 1 || NR % 7 == 0'

step 'proof, in f64: the gradient through the policy equals that of plain autograd, on the real weights'
# shellcheck disable=SC2086  # several words
$kvtune verify $with --samples 1 --set data.max_seq_length=192 --set 'data.on_too_long="truncate"' --set kv_cache.cache_length=96 \
    >"$demo/proof.log" 2>&1 || { cat "$demo/proof.log"; fail 'the gradient is not exact'; }
tail -n 3 "$demo/proof.log"

step 'questions about documents that it has not seen: the model as it was, and trained, with everything in the cache and with the policy'
# shellcheck disable=SC2086  # several words
$kvtune evaluate "$model" "$run" $with --set kv_cache.cache_length=$slots --set data.validation="$demo/judged.jsonl" \
    --policy dense,keydiff --metrics substring --max-new-tokens 24 --answers "$demo/answers.jsonl" --format json >"$demo/scores.json"
$kvtune report "$run" --scores "$demo/scores.json" >"$demo/report.log" 2>&1

right() {
    sed -n "$((questions * ($1 - 1) + 1)),$((questions * $1))p" "$demo/answers.jsonl" >"$demo/rated.jsonl"
    echo "$(python3 recipes/real/intervals.py "$demo/rated.jsonl") of $questions"
}
step "done. $(sed -n '$s/.*The secret code of the \([A-Z][a-z]* warehouse\) is \([0-9]*\)\..*/In the last document stands: "The secret code of the \1 is \2."/p' "$demo/judged.jsonl")"
answer() { sed -n "$1s/.*\"prediction\":\"\\([^\"]*\\)\".*/\\1/p" "$demo/answers.jsonl"; }
cat <<END

answered right                      everything in the cache   keydiff, $slots slots   its last answer with $slots slots
the model as it was                 $(right 1 | awk '{ printf "%-25s", $0 }') $(right 2 | awk '{ printf "%-19s", $0 }') $(answer $((2 * questions)))
trained through the policy          $(right 3 | awk '{ printf "%-25s", $0 }') $(right 4 | awk '{ printf "%-19s", $0 }') $(answer $((4 * questions)))

The adapter is $run/final (PEFT loads it), the page about the run $run/report.html.
Ask it about a document of your own: kvtune generate $run --prompt-file FILE
END
[ "$(right 4 | cut -d' ' -f1)" -gt "$(right 2 | cut -d' ' -f1)" ] || fail 'training has found no fact more'
