#!/usr/bin/env python3
"""What ranks cost and bring on this machine: samples a second of 2 ranks with a thread each, 1 rank with 2 threads and 1 with 1, in training; and
the sum of 100 MB of gradients over 2 ranks, beside that of PyTorch's own all_reduce where a Python with PyTorch is named.

    recipes/bench/ranks.py [--kvtune BINARY] [--rounds N] [--python PYTHON]   prints two tables in Markdown, in some minutes

The model is drawn from the `config.json` beside this file; a step is 4 samples of 1024 tokens by `step.toml`. Ways alternate within a round; the
tables have the medians of the rounds.
"""

import argparse
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile

from short_samples import HERE, find_binary

SAMPLES, TOKENS, STEPS = 4, 1024, 4

# The same as `kvtune doctor` does as a rank.
TORCH = """
import statistics, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
gradients, times = torch.zeros(25_000_000), []
for _ in range(6):
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(gradients)
    times.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print(statistics.median(times[1:]))
dist.destroy_process_group()
"""


def run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ranks.py: {' '.join(map(str, command))}: {done.stderr}")
    return done.stdout


def samples_per_second(binary, place, ranks, threads):
    out = tempfile.mkdtemp(dir=place)
    sets = [f"model.path={place}/model", f"data.train={place}/samples.jsonl", "data.validation_fraction=0", "train.micro_batch_size=1"]
    sets += [f"train.gradient_accumulation_steps={SAMPLES}", f"train.max_steps={STEPS}"]
    command = [binary, *(["launch", "--nproc", ranks, "--"] if ranks > 1 else []), "finetune-lora", "--recipe", HERE / "step.toml", "--out", out]
    command += ["--device", "cpu", "--threads", threads, *(word for one in sets for word in ("--set", one))]
    run(command)
    lines = [json.loads(line) for line in (pathlib.Path(out) / "metrics.jsonl").read_text().splitlines()]
    # The first step finds memory that was never touched.
    return SAMPLES / statistics.median(line["seconds"] for line in lines if line["step"] > 1)


def own_sum(binary):
    said = run([binary, "launch", "--nproc", 2, "--", "doctor", "--device", "cpu", "--threads", 1])
    number, unit = re.search(r"\[rank 0\].* added up in ([\d.]+) (ms|s),", said).groups()
    return float(number) / (1000 if unit == "ms" else 1)


def sum_of_torch(python):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([python, "-c", TORCH], env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    return float([rank.communicate()[0] for rank in ranks][0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvtune", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", help="a Python that has PyTorch")
    arguments = parser.parse_args()
    binary, draw = arguments.kvtune or find_binary(), random.Random(1)
    with tempfile.TemporaryDirectory(prefix="kvtune-bench-") as place:
        run([binary, "init-model", "--config", HERE / "config.json", "--out", f"{place}/model"])
        rows = [[draw.randrange(1, 2048) for _ in range(TOKENS)] for _ in range(SAMPLES * STEPS)]
        lines = [json.dumps({"input_ids": row, "labels": row}) + "\n" for row in rows]
        pathlib.Path(place, "samples.jsonl").write_text("".join(lines))
        ways = {(2, 1): [], (1, 2): [], (1, 1): []}
        for _ in range(arguments.rounds):
            for way, found in ways.items():
                found.append(samples_per_second(binary, place, *way))
    print("| ranks | threads of each | samples/s | against 1 × 1 |\n|---|---|---|---|")
    for (ranks, threads), found in ways.items():
        ratio = statistics.median(own / alone for own, alone in zip(found, ways[1, 1]))
        print(f"| {ranks} | {threads} | {statistics.median(found):.2f} | {ratio:.2f} |", flush=True)
    sums = {"kvtune": lambda: own_sum(binary)} | ({"PyTorch": lambda: sum_of_torch(arguments.python)} if arguments.python else {})
    found = {name: [] for name in sums}
    for _ in range(2 * arguments.rounds + 1):
        for name, measure in sums.items():
            found[name].append(measure())
    print("\n| sum of 100 MB over 2 ranks by Gloo | ms, median | least | most |\n|---|---|---|---|")
    for name, times in found.items():
        print(f"| {name} | {1000 * statistics.median(times):.0f} | {1000 * min(times):.0f} | {1000 * max(times):.0f} |")
    if arguments.python:
        ratio = statistics.median(own / other for own, other in zip(found["kvtune"], found["PyTorch"]))
        print(f"\nkvtune takes {ratio:.2f} times as long as PyTorch, the median of pairs; the machine's load is {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
