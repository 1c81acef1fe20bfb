#!/usr/bin/env python3
"""Training steps of kvtune and of Transformers with PEFT, in turn.

    recipes/bench/peers.py [--kvtune BINARY] [--rounds N] [--only WORD]   prints a table in Markdown, in some minutes
    recipes/bench/peers.py --only smollm2-135m --rounds 1                 the shape of SmolLM2-135M, in a quarter of an hour
    recipes/bench/peers.py --only qwen2.5-0.5b --rounds 1                 that of Qwen2.5-0.5B, in half an hour

The step is that of `step.toml`, on one thread; the shape of Qwen2.5-0.5B runs on two, with a vocabulary of 32 768, as the other
program's logits of 152 thousand would take 10 GB several times. Run it with a Python that has `torch`, `transformers` and `peft`. Each step
runs in a process of its own, after a step that warms up, but for the two large shapes; the other program's update is torch's AdamW. Ratios are
those of the CPU-seconds to the first row of a shape, taken within a round; the table has medians of the rounds, and the peak of the process.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NONE, KEEPS = "grad.keep_graph=none", "grad.attention_outputs=keep"
FULL = ("kv_cache.policy=dense", "kv_cache.cache_length=8192")
LAYERS = ("grad.layers_per_cell=auto",)
SMALL, SMOLLM, QWEN = "small", "smollm2-135m", "qwen2.5-0.5b"
# Model, sequences and tokens of each; then what is run, by name: settings of kvtune, or whether the other program checkpoints.
SHAPES = {
    (SMALL, 1, 8192): {
        "Transformers + PEFT, all tokens": False,
        "the same, gradient checkpointing": True,
        "kvtune, `h2o`, 1024 slots": (),
        "the same without kept graphs, attention's outputs kept": (NONE, KEEPS),
        "the same, nothing kept": (NONE,),
        "kvtune, `dense`, all tokens": FULL,
        "the same, nothing kept but the cache": (*FULL, NONE),
    },
    (SMALL, 16, 500): {"Transformers + PEFT": False, "kvtune": (), "kvtune, no graphs kept": (NONE,)},
    (SMALL, 64, 500): {"Transformers + PEFT": False, "kvtune": (), "kvtune, no graphs kept": (NONE,)},
    (SMOLLM, 1, 4096): {
        "Transformers + PEFT, all tokens": False,
        "the same, gradient checkpointing": True,
        "kvtune, `dense`, all tokens": (*LAYERS, *FULL),
    },
    (SMOLLM, 1, 8192): {
        "Transformers + PEFT, all tokens, gradient checkpointing": True,
        "kvtune, `h2o`, 1024 slots": LAYERS,
        "the same, no graphs kept": (*LAYERS, NONE),
    },
    (QWEN, 1, 16384): {
        "Transformers + PEFT, all tokens, gradient checkpointing": True,
        "kvtune, `h2o`, 4096 slots": ("kv_cache.cache_length=4096", "kv_cache.chunk_size=1024", *LAYERS),
    },
}


def setup(model):
    """The model's folder, threads, and steps that warm up."""
    return {SMALL: (HERE, 1, 1), SMOLLM: (HERE / SMOLLM, 1, 0), QWEN: (HERE / QWEN, 2, 0)}[model]


def find_binary():
    """The newest binary of this checkout."""
    built = [path for kind in ("release", "debug") if (path := ROOT / "target" / kind / "kvtune").exists()]
    if not built:
        sys.exit("no binary in target/: run `make build`, or name one with --kvtune")
    return max(built, key=lambda path: path.stat().st_mtime)


def peer(model, sequences, tokens, checkpoints):
    """Prints CPU-seconds, seconds and peak of a counted step of the other program."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, threads, warm_up = setup(model)
    sequences, tokens, checkpoints = int(sequences), int(tokens), checkpoints == "True"
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa", dtype=torch.float32)
    if checkpoints:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(warm_up + 1):
        ids = torch.randint(0, base.config.vocab_size, (sequences, tokens))
        began, began_wall = time.process_time(), time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds, wall = time.process_time() - began, time.perf_counter() - began_wall
    print(json.dumps([seconds, wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def run(binary, shape, what):
    """CPU-seconds, seconds and peak in MiB of a counted step."""
    (model, sequences, tokens), (folder, threads, warm_up) = shape, setup(shape[0])
    if isinstance(what, bool):
        command = [sys.executable, __file__, "--peer", model, sequences, tokens, what]
    else:
        command = [binary, "bench", "--recipe", HERE / "step.toml", "--steps", 1, "--random-weights", "--threads", threads]
        command += ["--warmup", warm_up, "--set", f"model.path={folder}", "--device", "cpu", "--format", "json", "--set", f"train.micro_batch_size={sequences}", "--tokens", tokens]
        command += [word for setting in what for word in ("--set", setting)]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if isinstance(what, bool):
        return lines[-1]
    step = next(line for line in lines if line["kind"] == "step" and not line["is_warm_up"])
    return step["step_cpu_seconds"], step["step_seconds"], step["peak_resident_bytes"] / 2**20


def is_asked_for(shape, words):
    model, sequences, tokens = shape
    # The large shapes take too long not to be named.
    return words in f"{model} {sequences} × {tokens}" and (model == SMALL or model in words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvtune", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the shapes that are run, such as 500, a model, or \"smollm2-135m 1 × 4096\"")
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return peer(*arguments.peer)
    binary = arguments.kvtune or find_binary()
    shapes = {shape: ways for shape, ways in SHAPES.items() if is_asked_for(shape, arguments.only)}
    rounds = [
        {(shape, way): run(binary, shape, what) for shape, ways in shapes.items() for way, what in ways.items()}
        for _ in range(arguments.rounds)
    ]
    print("| tokens | program | CPU-seconds | seconds | tokens a CPU-second | ratio | peak, MiB |\n|---|---|---|---|---|---|---|")
    for shape, ways in shapes.items():
        first = (shape, next(iter(ways)))
        for way in ways:
            found = [of_round[shape, way] for of_round in rounds]
            seconds, wall, peak = (statistics.median(figure) for figure in zip(*found))
            ratio = statistics.median(of_round[shape, way][0] / of_round[first][0] for of_round in rounds)
            rate = shape[1] * shape[2] / seconds
            print(f"| {shape[1]} × {shape[2]} | {way} | {seconds:.2f} | {wall:.2f} | {rate:.0f} | {ratio:.2f} | {peak:.0f} |")
    return None


if __name__ == "__main__":
    main()
