#!/bin/sh
# Does training with the policy in the loop pay? A base is trained with full attention; then each policy evicts, (a) from the base as
# it is, and (b) after LoRA training with the policy in the loop. Prints a line of accuracies for each.
#
#   KVTUNE=target/release/kvtune SEEDS="1 2 3" LENGTHS="128 64" sh recipes/long-range/run.sh
#
# Everything is written to data/long-range, and what is there already is not made again. The base takes about four minutes on one core.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$here/../../data/long-range
kvtune="${KVTUNE:-$here/../../target/debug/kvtune} --threads 1"
seeds=${SEEDS:-1 2 3}
lengths=${LENGTHS:-128 64}
tokens=512
# A policy's name, and how a recipe says it.
policies=${POLICIES:-'lastrec|"lastrec"
h2o|"h2o"
h2o, prefill scored|{ h2o = { score_prefill = true } }
snapkv|{ snapkv = { window_size = 8 } }
keydiff|"keydiff"
expected-attention|"expected-attention"'}
mkdir -p "$work"

[ -d "$work/random" ] || $kvtune init-model --config "$here/config.json" --out "$work/random" >&2
[ -d "$work/short" ] || $kvtune make-long-range-data --out "$work/short" --tokens 112 --train-samples 12000 --test-samples 1 --from-scratch >&2
[ -d "$work/middle" ] || $kvtune make-long-range-data --out "$work/middle" --tokens 512 --train-samples 2500 --test-samples 1 --from-scratch --seed 2 >&2
[ -d "$work/long" ] || $kvtune make-long-range-data --out "$work/long" --tokens $tokens --train-samples 4000 --test-samples ${TEST_SAMPLES:-200} --seed 3 >&2
[ -d "$work/start/final" ] || $kvtune finetune-full --recipe "$here/base.toml" --out "$work/start" >&2
[ -d "$work/base/final" ] || $kvtune finetune-full --recipe "$here/base.toml" --out "$work/base" --set model.path="$work/start/final" \
    --set data.train="$work/middle/train.jsonl" --set train.micro_batch_size=16 --set train.max_steps=300 --set optimizer.learning_rate=2e-3 >&2

# Accuracy on the three test files of what `$1…` evaluates, as `needle keys variables`.
accuracy() {
    for task in needle keys variables; do
        $kvtune evaluate "$@" --format json --set data.validation="$work/long/test-$task.jsonl" 2>/dev/null |
            sed 's/.*"overall":{"accuracy":\([0-9.]*\).*/\1/'
    done | tr '\n' ' '
}

line() {
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4"
}

# One policy at one cache length: (a), then (b) for each seed.
one() {
    name=$1 policy=$2 length=$3
    line "$name" "$length" "base" "$(accuracy --base "$work/base/final" --recipe "$here/policy.toml" --set kv_cache.policy="$policy" --set kv_cache.cache_length="$length")"
    for seed in $seeds; do
        run="$work/runs/$(echo "$name" | tr ' ,' '__')-$length-$seed"
        [ -d "$run/final" ] || $kvtune finetune-lora --recipe "$here/policy.toml" --out "$run" --set kv_cache.policy="$policy" \
            --set kv_cache.cache_length="$length" --set train.seed="$seed" >/dev/null 2>&1
        line "$name" "$length" "seed $seed" "$(accuracy "$run")"
    done
}

line policy slots trained 'needle keys variables'
line dense all base "$(accuracy --base "$work/base/final" --recipe "$here/policy.toml" --set kv_cache.policy=dense --set kv_cache.cache_length=$tokens)"
for length in $lengths; do
    echo "$policies" | while IFS='|' read -r name policy; do
        one "$name" "$policy" "$length"
    done
done
