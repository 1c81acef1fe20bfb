#!/bin/sh
# Does training with a policy in the loop find facts in real prose that the policy otherwise loses? A LoRA adapter is trained on the real model with
# the full cache, and others with each policy in the loop, by the same samples and steps; all of them, and the base, write answers through each cache,
# the adapter of the full cache also through `learned` with the gates that `calibrate` finds for it on 64 of its own samples (GATE_SAMPLES). Prints a
# line for each, tab-separated: facts in a sample, seed, how it was trained, cache of the answers, slots, questions, right answers.
#
#   sh recipes/real/fetch.sh && cargo build --release
#   JOBS=2 SEEDS="1 2 3" sh recipes/real/run.sh > lines.tsv
#
# A job takes one thread and up to 4 GiB: some 14 to 18 minutes to train, 15 to calibrate, and 5 for each of its lines of 104 questions. DEVICE=cuda
# takes a GPU.
# Everything is written to data/real, or DATA, and what is there already is not made again: an interrupted run goes on where it was. FACTS=4 puts four
# facts into each sample; take another DATA for them, with the files of `fetch.sh`.
set -eu
here=$(cd "$(dirname -- "$0")" && pwd)
work=${DATA:-$here/../../data/real}
kvtune="${KVTUNE:-$here/../../target/release/kvtune} --threads 1 --quiet --device ${DEVICE:-cpu}"
seeds=${SEEDS:-1 2 3}
caches=${CACHES:-keydiff:384 keydiff:192}
calibrated=${CALIBRATED:-learned:384 learned:192 learned:96}
steps=${STEPS:-64}
questions=${QUESTIONS:-104}

# Trains an adapter: `train RUN POLICY SLOTS SEED`.
train() {
    [ -d "$1/final" ] && return
    $kvtune finetune-lora --recipe "$here/needles.toml" --out "$1" --resume-if-possible \
        --set checkpoint.intermediate_save_interval=8 --set data.train="$work/facts-$4.jsonl" \
        --set model.path="$work/SmolLM2-135M-Instruct.Q4_1.gguf" --set train.seed="$4" --set train.max_steps="$steps" --set kv_cache.policy="\"$2\"" --set kv_cache.cache_length="$3" >>"$1.log" 2>&1
}

# Finds the gates of an adapter of the full cache: `calibrate RUN SEED`.
calibrate() {
    [ -d "$work/gates-$2" ] && return
    rm -rf "$work/gates-$2.part"
    $kvtune calibrate "$1" --recipe "$here/needles.toml" --set data.train="$work/facts-$2.jsonl" --set data.validation_fraction=0 \
        --set model.path="$work/SmolLM2-135M-Instruct.Q4_1.gguf" --split train --limit "${GATE_SAMPLES:-64}" --out "$work/gates-$2.part" >>"$1.log" 2>&1
    mv "$work/gates-$2.part" "$work/gates-$2"
}

# Writes the line of a model: `score SEED TRAINED MODEL POLICY SLOTS`.
score() {
    line=$work/lines/$1-$2-$4-$5
    [ -f "$line" ] && return
    policy="\"$4\"" gates=
    [ "$4" = learned ] && policy='{ learned = { gate_alone = true } }' gates="--set kv_cache.gates=$work/gates-$1"
    # shellcheck disable=SC2086  # two words, or none
    $kvtune evaluate "$3" --recipe "$here/needles.toml" --set data.train="$work/facts-judged.jsonl" \
        --set data.validation="$work/facts-judged.jsonl" --set model.path="$work/SmolLM2-135M-Instruct.Q4_1.gguf" \
        --set kv_cache.policy="$policy" --set kv_cache.cache_length="$5" $gates --answers "$line.jsonl" --metrics exact_match --max-new-tokens 24 \
        >"$line.log" 2>&1
    right=$(python3 "$here/intervals.py" "$line.jsonl")
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$4" "$5" "$(wc -l <"$line.jsonl")" "$right" >"$line.part"
    mv "$line.part" "$line"
}

# One job of the grid, `job SEED TRAINED`.
if [ "${1-}" = job ]; then
    run=$work/runs/$2-$3
    case $3 in
    base) run=$work/SmolLM2-135M-Instruct.Q4_1.gguf ;;
    full)
        train "$run" dense 2048 "$2"
        calibrate "$run" "$2"
        for cache in $calibrated; do
            score "$2" full "$run" "${cache%:*}" "${cache#*:}"
        done
        ;;
    *) train "$run" "${3%:*}" "${3#*:}" "$2" ;;
    esac
    for cache in dense:2048 $caches; do
        case $cache-$3 in
        *-base | *-full | "$3-$3") score "$2" "$3" "$run" "${cache%:*}" "${cache#*:}" ;;
        esac
    done
    exit
fi

mkdir -p "$work/runs" "$work/lines"
needles() { python3 "$here/needles.py" --prose "$work/prose" --facts "${FACTS:-1}" "$@"; }
[ -f "$work/facts-judged.jsonl" ] || needles --sections I,J --rows "$questions" --seed 1000 >"$work/facts-judged.jsonl"
for seed in $seeds; do
    [ -f "$work/facts-$seed.jsonl" ] || needles --sections A,B,C,D,E,F,G,H --rows 256 --seed "$seed" >"$work/facts-$seed.jsonl"
done
{
    for seed in $seeds; do
        for trained in $caches full; do echo "job $seed $trained"; done
    done
    echo "job - base"
} | xargs -P "${JOBS:-1}" -L 1 sh "$here/run.sh"
sed "s/^/${FACTS:-1}\t/" "$work"/lines/*-*[0-9]
