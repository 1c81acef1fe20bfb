#!/bin/sh
# What do gates and slots by layer bring? Calibrates the model without an adapter on passages of the chapters A-H that no other file has, and prints the
# lines of `policies.sh` with what was found, for the default policy and for `learned`.
#
#   sh recipes/real/fetch.sh && cargo build --release
#   TEXTS=judged sh recipes/real/calibrated.sh 512 1024 > lines.tsv
#
# Calibration takes some eight minutes of one thread, and each line one more; DEVICE=cuda takes a GPU. What is there already in data/real is not made
# again.
set -eu
here=$(cd "$(dirname -- "$0")" && pwd)
work=${DATA:-$here/../../data/real}
found=$work/calibrated-$(echo "$@" | tr ' ' -)
if [ ! -f "$found.json" ]; then
    python3 "$here/needles.py" --prose "$work/prose" --sections A,B,C,D,E,F,G,H --characters 36500 --rows 2 --facts 0 --seed 21 >"$found.jsonl"
    rm -rf "$found"
    "${KVTUNE:-$here/../../target/release/kvtune}" --threads 1 --quiet --device "${DEVICE:-cpu}" --format json calibrate "$work/SmolLM2-135M-Instruct.Q4_1.gguf" \
        --recipe "$here/prose.toml" --set data.train="$found.jsonl" --set data.validation_fraction=0 --split train \
        --cache-length "$(echo "$@" | tr ' ' ,)" --out "$found" >"$found.part"
    mv "$found.part" "$found.json"
fi
python3 - "$found.json" >"$found.txt" <<'END'
import json, sys

for lengths in json.load(open(sys.argv[1]))["cache_lengths"]:
    lengths = json.dumps(lengths, separators=(",", ":"))
    print(lengths, 64, "{h2o={normalize_scores=true,grace_period=0.375}}")
    print(lengths, 64, "{learned={grace_period=0.375}}")
END
GATES=$found sh "$here/policies.sh" "$found.txt"
