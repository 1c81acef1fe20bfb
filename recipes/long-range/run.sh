#!/bin/sh
# Does training with the policy in the loop pay? A base is trained with full attention. From it LoRA adapters are trained, with the
# dense cache and with each policy in the loop, on the same samples for as many steps, and evaluated under each policy. Prints a line
# of accuracies for each, tab-separated; `summary.sh` makes a table of them.
#
#   cargo build --bin kvtune --example long-range-data
#   JOBS=2 SEEDS="1 2 3" LENGTHS="128 64" sh recipes/long-range/run.sh > lines.tsv
#   sh recipes/long-range/summary.sh < lines.tsv
#
# Everything is written to data/long-range, and what is there already is not made again: an interrupted run goes on where it was.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$here/../../data/long-range
kvtune="${KVTUNE:-$here/../../target/debug/kvtune} --threads 1"
maker=${MAKER:-$here/../../target/debug/examples/long-range-data}
seeds=${SEEDS:-1 2 3}
lengths=${LENGTHS:-64 128}
policies=${POLICIES:-keydiff h2o h2o-scored expected-attention snapkv lastrec}
tokens=512

# How a recipe says a policy.
policy() {
    case $1 in
    h2o-scored) echo '{ h2o = { score_prefill = true } }' ;;
    snapkv) echo '{ snapkv = { window_size = 8 } }' ;;
    *) echo "\"$1\"" ;;
    esac
}

# Trains an adapter: `train NAME POLICY LENGTH SEED`. Its order of samples and its first weights depend on the seed alone.
train() {
    run=$work/runs/$1
    [ -d "$run/final" ] && return
    rm -rf "$run"
    $kvtune finetune-lora --recipe "$here/policy.toml" --out "$run" --set kv_cache.policy="$2" --set kv_cache.cache_length="$3" \
        --set train.seed="$4" >"$run.log" 2>&1
}

# Writes the line of a run under a policy: `score SHOWN SLOTS SEED TRAINED RUN POLICY LENGTH MORE_TASKS`.
score() {
    line=$work/lines/$1-$2-$3-$4
    [ -f "$line" ] && return
    text=$(printf '%s\t%s\t%s\t%s' "$1" "$2" "$3" "$4")
    for task in needle keys $8; do
        said=$($kvtune evaluate "$work/runs/$5" --format json --set kv_cache.policy="$6" --set kv_cache.cache_length="$7" \
            --set data.validation="$work/long/test-$task.jsonl" 2>>"$line.log")
        text=$(printf '%s\t%s' "$text" "$(echo "$said" | sed 's/.*"overall":{"accuracy":\([0-9.]*\).*/\1/')")
    done
    echo "$text" >"$line.part"
    mv "$line.part" "$line"
}

# One job of the grid, `POLICY LENGTH SEED TRAINED`: a line, and the adapter that it needs.
if [ "${1-}" = job ]; then
    case $2-$5 in
    full-dense)
        train "full-$4" '"dense"' $tokens "$4"
        score full all "$4" dense "full-$4" '"dense"' $tokens variables
        ;;
    *-dense) score "$2" "$3" "$4" dense "full-$4" "$(policy "$2")" "$3" '' ;;
    *)
        train "$2-$3-$4" "$(policy "$2")" "$3" "$4"
        score "$2" "$3" "$4" policy "$2-$3-$4" "$(policy "$2")" "$3" ''
        ;;
    esac
    exit
fi

mkdir -p "$work/runs" "$work/lines"
data() {
    name=$1
    shift
    [ -d "$work/$name" ] || "$maker" --out "$work/$name" "$@" >&2
}
base() {
    out=$work/$1 from=$work/$2 samples=$work/$3/train.jsonl
    shift 3
    [ -d "$out/final" ] || $kvtune finetune-full --recipe "$here/base.toml" --out "$out" --set model.path="$from" \
        --set data.train="$samples" "$@" >&2
}
[ -d "$work/random" ] || $kvtune init-model --config "$here/config.json" --out "$work/random" >&2
data short --ask-all --tokens 112 --train-samples 12000 --test-samples 1 --copies
data short-asked --ask-all --tokens 112 --train-samples 6000 --test-samples 1 --seed 4
data middle --ask-all --tokens $tokens --train-samples 1500 --test-samples 1 --seed 2
data long --tokens $tokens --train-samples 1500 --test-samples 200 --seed 3
base start random short
base second start/final short-asked --set train.max_steps=280 --set optimizer.learning_rate=5e-3 --set optimizer.warmup_steps=30
base base second/final middle --set train.micro_batch_size=16 --set train.max_steps=150 --set optimizer.learning_rate=2e-3 \
    --set optimizer.warmup_steps=10
# The base doesn't learn to follow chains, so the adapters are not asked to.
mkdir -p "$work/lookups"
[ -f "$work/lookups/train.jsonl" ] || grep -v '"task":"variables"' "$work/long/train.jsonl" >"$work/lookups/train.jsonl"

# What can be compared first comes first. A job that fails stops all.
full() {
    for seed in $seeds; do
        echo "full all $seed dense"
    done
}
grid() {
    for length in $lengths; do
        for trained in dense policy; do
            for seed in $seeds; do
                for policy in $policies; do
                    echo "$policy $length $seed $trained"
                done
            done
        done
    done
}
full | xargs -P "${JOBS:-2}" -L 1 sh "$0" job
grid | xargs -P "${JOBS:-2}" -L 1 sh "$0" job

printf 'policy\tslots\tseed\ttrained\tneedle\tkeys\tvariables\n'
{ full && grid; } | while read -r policy length seed trained; do
    cat "$work/lines/$policy-$length-$seed-$trained"
done
