#!/bin/sh
# Installs a wheel into a throw-away environment and tries it there: `in_venv.sh wheel FILE.whl` the program, `in_venv.sh tests FILE.whl` the
# package. pip takes torch from where it is told to, as by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS for its build without CUDA. PIP_CONSTRAINT may
# name a file that holds another Transformers than the newest, as `transformers==5.3.*`.
set -eu
what=$1
wheel=$(realpath "$2")
root=$(cd "$(dirname -- "$0")/.." && pwd)
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
trap 'exit 130' INT TERM
python3 -m venv "$venv"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset KVTUNE LD_LIBRARY_PATH PYTHONPATH || true

if [ "$what" = tests ]; then
    "$venv/bin/pip" install --quiet "kvtune[transformers] @ file://$wheel" pytest nbclient ipykernel
    "$venv/bin/pip" list 2>/dev/null | grep -E "^(torch|transformers|peft) "
    cd "$root/python/tests"
    "$venv/bin/python" -m pytest -p no:cacheprovider -q .
    exit
fi

"$venv/bin/pip" install --quiet ${PIP_OPTIONS:-} "$wheel"
cd "$venv"
PATH="$venv/bin:$PATH"
kvtune --version
kvtune doctor
cat >train.jsonl <<END
{"input_ids": [5, 17, 202, 33, 48, 61, 99, 123, 7, 8, 9, 10, 11, 12, 13], "labels": [5, 17, 202, 33, 48, 61, 99, 123, 7, 8, 9, 10, 11, 12, 13]}
END
cat >recipe.toml <<END
[model]
path = "$root/tests/fixtures/model-qwen2"
dtype = "f32"
[lora]
r = 4
[data]
format = "tokens"
train = "train.jsonl"
[train]
max_steps = 1
[kv_cache]
policy = "h2o"
cache_length = 12
chunk_size = 4
END
kvtune train recipe.toml --out run
kvtune generate run --prompt-tokens 5,17,202,33,48,61,99,123,7,8,9,10,11,12,13,14 --greedy --max-new-tokens 8 --format json
python -c 'import kvtune; print(kvtune.run("inspect", "run").wait() and "the package runs it, too")'
