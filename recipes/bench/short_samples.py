#!/usr/bin/env python3
"""Tokens a CPU-second of short samples of all lengths, beside samples that are all equally long.

    recipes/bench/short_samples.py [--kvtune BINARY] [--rounds N] [--set KEY=VALUE]   prints a table in Markdown, in some minutes

The step is that of `step.toml`. Lengths are drawn from a log-normal distribution; batches are made as a run makes them: the longest first,
either so many sequences or so many tokens. The equally long have the mean of these lengths. Of each way to batch, five
batches are run, in the middles of five equal parts of all. Ways alternate within a round; the table has the medians of the rounds.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SAMPLES, MEDIAN, SPREAD, SHORTEST, LONGEST = 4096, 150, 0.7, 16, 1024
TOKENS = 8192


def find_binary():
    """The newest binary of this checkout."""
    built = [path for kind in ("release", "debug") if (path := ROOT / "target" / kind / "kvtune").exists()]
    if not built:
        sys.exit("no binary in target/: run `make build`, or name one with --kvtune")
    return max(built, key=lambda path: path.stat().st_mtime)


def by_tokens(lengths):
    batches = []
    for length in sorted(lengths, reverse=True):
        if batches and sum(batches[-1]) + length <= TOKENS:
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def by_count(lengths, count):
    ordered = sorted(lengths, reverse=True)
    return [ordered[at : at + count] for at in range(0, len(ordered), count)]


def run_bench(binary, settings, batch):
    """Tokens, tokens that were run with pads, and CPU-seconds of one counted step."""
    command = [binary, "bench", "--recipe", HERE / "step.toml", "--steps", 1, "--random-weights", "--threads", 1, "--device", "cpu"]
    command += ["--format", "json", "--set", f"train.micro_batch_size={len(batch)}", "--tokens", ",".join(map(str, batch))]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    steps = [line for line in map(json.loads, done.stdout.splitlines()) if line["kind"] == "step" and not line["is_warm_up"]]
    return sum(batch), steps[0]["tokens_run"], steps[0]["step_cpu_seconds"]


def run_way(binary, settings, batches):
    """Sums over the chosen batches."""
    chosen = [batches[len(batches) * part // 10] for part in (1, 3, 5, 7, 9)]
    found = [run_bench(binary, settings, batch) for batch in chosen]
    return [sum(part[figure] for part in found) for figure in range(3)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvtune", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipe, such as grad.keep_graph=auto")
    arguments = parser.parse_args()
    binary, draw = arguments.kvtune or find_binary(), random.Random(1)
    lengths = [min(LONGEST, max(SHORTEST, round(draw.lognormvariate(0, SPREAD) * MEDIAN))) for _ in range(SAMPLES)]
    mean = round(statistics.mean(lengths))
    ways = {
        f"all of {mean} tokens, {TOKENS // mean} at a time": by_tokens([mean] * SAMPLES),
        f"`max_tokens_per_batch = {TOKENS}`": by_tokens(lengths),
        "`micro_batch_size = 32`": by_count(lengths, 32),
        "`micro_batch_size = 1`": by_count(lengths, 1),
    }
    rounds = [{way: run_way(binary, arguments.set, batches) for way, batches in ways.items()} for _ in range(arguments.rounds)]
    print(f"{SAMPLES} samples of {min(lengths)} to {max(lengths)} tokens, {mean} on average\n")
    print("| samples | batches | sequences in a batch | tokens run for one | tokens a CPU-second | ratio |\n|---|---|---|---|---|---|")
    first = None
    for way, batches in ways.items():
        rates = [found[way][0] / found[way][2] for found in rounds]
        ratio = statistics.median(found[way][0] / found[way][2] * found[first or way][2] / found[first or way][0] for found in rounds)
        first = first or way
        tokens, run, _ = rounds[0][way]
        widths = f"{min(map(len, batches))} to {max(map(len, batches))}"
        print(f"| {way} | {len(batches)} | {widths} | {run / tokens:.3f} | {statistics.median(rates):.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
