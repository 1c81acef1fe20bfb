#!/bin/sh
# Does training with a policy in the loop help on real prose? LoRA adapters are trained on the same passages: with the full cache (full), with the
# policy in the loop (loop), in the loop with distillation from the model without an adapter (distilled); and for as many steps more from the adapter of
# the full cache: in the loop (after-full), in the loop with distillation alone from the model with that adapter (from-full), with the full cache
# (full-twice). Prints the loss of each on passages that nothing else has seen, with the full cache and with the policy, over all tokens and over those
# that need what lies further back than the cache holds; tab-separated: seed, how it was trained, cache, loss, loss of the far tokens.
#
#   sh recipes/real/fetch.sh && cargo build --release
#   SEEDS="1 2 3" ARMS="full loop from-full" sh recipes/real/prose.sh > lines.tsv
#
# An adapter takes some 12 minutes of one thread, and up to 5 GiB. On a GPU a step of several passages takes hardly longer than one of one:
#
#   DEVICE=cuda STEPS=24 ROWS=24 SETTINGS="--set train.micro_batch_size=8 --set eval.micro_batch_size=24 --set grad.layers_per_cell=30
#     --set grad.chunks_per_cell=4 --set grad.keep_graph=none" sh recipes/real/prose.sh > lines.tsv
#
# For `learned` with slots by layer, NAME=learned POLICY='{ learned = { grace_period = 0.375 } }' and, as `calibrated.sh` finds them, GATES (a directory)
# and LENGTHS (an array). What is there already in data/real is not made again. NAME and SLOTS name it, so take another NAME for another POLICY, LENGTHS
# or GATES, and another folder (DATA) for other STEPS, ROWS or SETTINGS. Arms and seeds may run side by side once the lines of the base (SEEDS=" ") and
# the adapters of `full` are there.
set -eu
here=$(cd "$(dirname -- "$0")" && pwd)
work=${DATA:-$here/../../data/real}
kvtune="${KVTUNE:-$here/../../target/release/kvtune} --threads 1 --quiet --device ${DEVICE:-cpu}"
model=$work/SmolLM2-135M-Instruct.Q4_1.gguf
# What adapters are trained on and evaluated with.
base=$model
policy=${POLICY:-"{ h2o = { normalize_scores = true, grace_period = 0.375 } }"}
name=${NAME:-h2o}
slots=${SLOTS:-512}
steps=${STEPS:-48}
# Lengths by layer and gates, as `kvtune calibrate` makes them; so many slots in the mean.
lengths=${LENGTHS:-$slots}
gates=${GATES:+--set kv_cache.gates=$GATES}
dense="--set kv_cache.policy=dense --set kv_cache.cache_length=8192"
out=$work/prose-$name-$slots

passages() { python3 "$here/needles.py" --prose "$work/prose" --facts 0 --characters 18400 "$@"; }
mkdir -p "$out" "$work/prose-full"
[ -f "$work/prose-train.jsonl" ] || passages --sections A,B,C,D,E,F,G,H --rows 400 --seed 1 >"$work/prose-train.jsonl"
[ -f "$work/prose-judged.jsonl" ] || passages --sections I,J --rows "${ROWS:-6}" --seed 1000 >"$work/prose-judged.jsonl"

# Evaluates on the judged passages: `evaluate WORDS`.
# shellcheck disable=SC2086  # several words
evaluate() {
    $kvtune evaluate --recipe "$here/prose.toml" --set data.train="$work/prose-judged.jsonl" \
        --set data.validation="$work/prose-judged.jsonl" --set model.path="$base" $gates --set kv_cache.cache_length="$lengths" ${SETTINGS:-} "$@"
}

if [ ! -f "$out/classes.jsonl" ]; then
    evaluate "$model" --policy dense --losses "$out/whole.jsonl" >/dev/null
    evaluate "$model" --policy dense --losses "$out/windows.jsonl" --set data.max_seq_length="$slots" --set 'data.on_too_long="split"' \
        --set data.split_overlap=$((slots / 2)) >/dev/null
    python3 "$here/far.py" "$out/whole.jsonl" "$out/windows.jsonl" >"$out/classes.part$$"
    mv "$out/classes.part$$" "$out/classes.jsonl"
fi

# Trains an adapter: `train RUN SEED WORDS`.
# shellcheck disable=SC2086  # several words
train() {
    run=$1 seed=$2
    shift 2
    [ -d "$run/final" ] && return
    $kvtune finetune-lora --recipe "$here/prose.toml" --out "$run" --resume-if-possible \
        --set checkpoint.intermediate_save_interval=8 --set data.train="$work/prose-train.jsonl" \
        --set model.path="$base" --set train.seed="$seed" --set train.max_steps="$steps" --set data.validation_fraction=0 \
        ${SETTINGS:-} "$@" >>"$run.log" 2>&1
}

# The lines of a model: `score SEED TRAINED MODEL`.
score() {
    [ -f "$out/line-$1-$2" ] || {
        evaluate "$3" --policy dense --token-classes "$out/classes.jsonl" --format json >"$out/line-$1-$2.part$$"
        evaluate "$3" --set kv_cache.policy="$policy" --token-classes "$out/classes.jsonl" --losses "$out/losses-$1-$2.jsonl" --format json \
            >>"$out/line-$1-$2.part$$"
        mv "$out/line-$1-$2.part$$" "$out/line-$1-$2"
    }
    python3 - "$1" "$2" "$out/line-$1-$2" <<'END'
import json, sys

for line in open(sys.argv[3]):
    found = json.loads(line)
    print(*sys.argv[1:3], found["policy"], found["scores"]["overall"]["loss"], found["by_class"]["far"]["loss"], sep="\t")
END
}

score - base "$model"
for seed in ${SEEDS:-1}; do
    own=$out/run-$seed
    full=$work/prose-full/run-$seed merged=$work/prose-full/merged-$seed
    # shellcheck disable=SC2086  # several words
    for arm in ${ARMS:-full loop distilled after-full from-full}; do
        base=$model
        case $arm in
        full | after-full | from-full | full-twice) train "$full" "$seed" $dense ;;
        esac
        case $arm in
        full)
            score "$seed" full "$full"
            continue
            ;;
        full-twice)
            train "$full-twice" "$seed" $dense --set model.adapter="$full/final"
            score "$seed" full-twice "$full-twice"
            continue
            ;;
        loop) set -- ;;
        distilled) set -- --set head.distill='{ weight = 0.9 }' ;;
        after-full) set -- --set model.adapter="$full/final" ;;
        from-full)
            # What is distilled from is the model without the adapter that is trained.
            base=$merged
            [ -d "$merged" ] || $kvtune export "$full" --for merged --out "$merged" >>"$full.log" 2>&1
            set -- --set head.distill='{ weight = 1.0 }'
            ;;
        *)
            echo "prose.sh: error: there is no arm \`$arm\`" >&2
            exit 2
            ;;
        esac
        train "$own-$arm" "$seed" $gates --set kv_cache.cache_length="$lengths" --set kv_cache.policy="$policy" "$@"
        score "$seed" "$arm" "$own-$arm"
    done
done
