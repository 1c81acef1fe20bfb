#!/bin/sh
# What does each policy cost on real prose, by its parameters and the size of chunks? Prints the loss of the model without an adapter, for each
# line `SLOTS CHUNK POLICY` of a file, tab-separated: slots, chunk, policy, tokens, loss.
#
#   sh recipes/real/fetch.sh && cargo build --release
#   TEXTS=search sh recipes/real/policies.sh recipes/real/policies.txt > lines.tsv
#
# DEVICE=cuda takes a GPU. GATES=DIR names what `kvtune calibrate` has written, for `learned` and `triattention`.
# Texts: `search`, by which parameters are chosen, or `judged`, which are used for nothing else. What is there already is not made again.
set -eu
here=$(cd "$(dirname -- "$0")" && pwd)
work=${DATA:-$here/../../data/real}
kvtune="${KVTUNE:-$here/../../target/release/kvtune} --threads 1 --quiet --device ${DEVICE:-cpu}"
texts=${TEXTS:-search}
if [ "$texts" = search ]; then sections=A,B,C,D,E,F,G,H; else sections=I,J; fi
passages=$work/$texts.jsonl
[ -f "$passages" ] || python3 "$here/needles.py" --prose "$work/prose" --sections $sections --characters 36500 --rows "${ROWS:-2}" --facts 0 \
    --seed 5 >"$passages"
mkdir -p "$work/losses"
failed=0
while read -r slots chunk policy; do
    result=$work/losses/$texts-$(printf '%s' "$slots $chunk $policy${GATES:+ ${GATES##*/}}" | tr -c 'A-Za-z0-9.\n' _)
    if [ ! -f "$result" ]; then
        $kvtune --format json evaluate --base "$work/SmolLM2-135M-Instruct.Q4_1.gguf" --recipe "$here/prose.toml" \
            --set data.train="$passages" --set data.validation="$passages" --set kv_cache.cache_length="$slots" \
            --set kv_cache.chunk_size="$chunk" --set kv_cache.policy="$policy" ${GATES:+--set kv_cache.gates="$GATES"} </dev/null >"$result.part" || { cat "$result.part" >&2; failed=1; continue; }
        mv "$result.part" "$result"
    fi
    sed "s|.*\"targets\":\([0-9]*\),\"loss\":\([0-9.]*\).*|$slots\t$chunk\t$policy\t\1\t\2|" "$result"
done <"$1"
exit "$failed"
