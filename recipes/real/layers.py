#!/usr/bin/env python3
"""How many slots does each layer need? Evaluates the model without an adapter under the policy of `prose.toml`, with a full cache and with a short one in some layers at a time; prints
the losses, tab-separated, and the lengths by layer that share out a mean: in proportion to the square root of what a short cache costs a layer,
which is the best share where that cost falls with the length as 1/length.

    sh recipes/real/fetch.sh && cargo build --release
    TEXTS=search sh recipes/real/policies.sh /dev/null    # makes the passages
    python3 recipes/real/layers.py --mean 1024

Parameters are chosen on these passages, never on the judged ones. A group of layers takes a minute of one thread.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess

here = pathlib.Path(__file__).parent
work = pathlib.Path(os.environ.get("DATA", here / "../../data/real"))
kvtune = os.environ.get("KVTUNE", here / "../../target/release/kvtune")
arguments = argparse.ArgumentParser()
arguments.add_argument("--layers", type=int, default=30)
arguments.add_argument("--group", type=int, default=5, help="layers that are shortened together")
arguments.add_argument("--short", type=int, default=256, help="slots of a short cache")
arguments.add_argument("--mean", type=int, nargs="+", default=[512, 1024], help="slots to share out, in the mean over layers")
arguments.add_argument("--step", type=int, default=64, help="lengths are multiples of this")
arguments = arguments.parse_args()


def loss(lengths):
    said = subprocess.run(
        [kvtune, "--threads", "1", "--quiet", "--format", "json", "evaluate", "--device", "cpu", "--recipe", here / "prose.toml"]
        + ["--base", work / "SmolLM2-135M-Instruct.Q4_1.gguf", "--set", f"data.train={work}/search.jsonl"]
        + ["--set", f"data.validation={work}/search.jsonl", "--set", f"kv_cache.cache_length={lengths}"],
        check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )
    return json.loads(said.stdout)["scores"]["overall"]["loss"]


def shared_out(mean, costs):
    """Multiples of `step`, at least two of them, with the given mean."""
    roots = [math.sqrt(max(cost, 1e-6)) for cost in costs]
    lengths = [max(2, round(mean * len(roots) * root / sum(roots) / arguments.step)) for root in roots]
    while (rest := mean * len(roots) // arguments.step - sum(lengths)) != 0:
        lengths[max(range(len(lengths)), key=lengths.__getitem__)] += 1 if rest > 0 else -1
    return [length * arguments.step for length in lengths]


whole = 8192
full = loss([whole] * arguments.layers)
print(f"none\t{full:.4f}", flush=True)
costs = []
for first in range(0, arguments.layers, arguments.group):
    short = range(first, first + arguments.group)
    found = loss([arguments.short if layer in short else whole for layer in range(arguments.layers)])
    costs += [(found - full) / arguments.group] * len(short)
    print(f"{short.start}-{short.stop - 1}\t{found:.4f}", flush=True)
for mean in arguments.mean:
    lengths = shared_out(mean, costs)
    print(f"{lengths}\t{loss(lengths):.4f}", flush=True)
