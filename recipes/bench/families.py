#!/usr/bin/env python3
"""CPU time of the same training step in several families.

    recipes/bench/families.py [--kvtune BINARY] [--rounds N]   prints a table in Markdown, in some minutes

The step is that of `step.toml`. The models are the `config.json` in the folders beside this file, which have the same widths and active work:
8 experts of half the width, of which a token goes to 2, for one MLP. A layer that slides over a window of W tokens holds W and a chunk less
one, so it is compared with `h2o` over as many slots. Ratios are taken within a round, in which every step is made once and counted; the table
has their medians, and those of the seconds.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECIPE = HERE / "step.toml"
TOKENS, WINDOW = 8192, 1024
PARTS = ["forward", "head", "recompute", "backward", "step"]


def find_binary():
    """The newest binary of this checkout."""
    built = [path for kind in ("release", "debug") if (path := ROOT / "target" / kind / "kvtune").exists()]
    if not built:
        sys.exit("no binary in target/: run `make build`, or name one with --kvtune")
    return max(built, key=lambda path: path.stat().st_mtime)


def run_bench(binary, family, slots):
    """The figures of one counted step."""
    command = [binary, "bench", "--recipe", RECIPE, "--tokens", TOKENS, "--steps", 1, "--random-weights", "--threads", 1]
    command += ["--device", "cpu", "--format", "json", "--set", f"model.path={HERE / family}"]
    command += ["--set", f"kv_cache.cache_length={slots}"]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    summary = next(line for line in map(json.loads, done.stdout.splitlines()) if line["kind"] == "summary")
    return {name: figure["median"] for name, figure in summary.items() if isinstance(figure, dict)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvtune", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    binary, cache = arguments.kvtune or find_binary(), tomllib.loads(RECIPE.read_text())["kv_cache"]
    slots, as_window = cache["cache_length"], WINDOW + cache["chunk_size"] - 1
    # What is run, over how many slots where no window says, and which step it is compared with.
    dense, wide = ("llama", slots), ("llama", as_window)
    compared = {dense: None, wide: None, ("mixtral", slots): dense, ("mistral", slots): wide, ("gemma3", as_window): wide}
    rounds = [{step: run_bench(binary, *step) for step in compared} for _ in range(arguments.rounds)]
    print("| model | layers | slots |", " | ".join(PARTS), "| of sgemm | ratio to |")
    print("|---" * (len(PARTS) + 5) + "|")
    for step, other in compared.items():
        family = json.loads((HERE / step[0] / "config.json").read_text())
        slides = family.get("layer_types", ["sliding_attention" if "sliding_window" in family else "h2o"])
        layers = ", ".join(sorted({"window" if kind == "sliding_attention" else "`h2o`" for kind in slides}))
        held = as_window if "window" in layers else step[1]
        middle = lambda name: statistics.median(figures[step][name] for figures in rounds)
        ratio = ""
        if other:
            ratios = [figures[step]["step_cpu_seconds"] / figures[other]["step_cpu_seconds"] for figures in rounds]
            ratio = f"{statistics.median(ratios):.2f} × `{other[0]}`, {other[1]} slots"
        seconds = " | ".join(f"{middle(f'{part}_cpu_seconds'):.2f}" for part in PARTS)
        print(f"| `{step[0]}` | {layers} | {held} | {seconds} | {100 * middle('gemm_cpu_share'):.0f} % | {ratio} |")


if __name__ == "__main__":
    main()
