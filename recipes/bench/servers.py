#!/usr/bin/env python3
"""Requests to `kvtune serve` and to other servers of OpenAI's protocol on the same model, in turn.

    recipes/bench/servers.py [--kvtune BINARY] [--rounds N] [--only WORD]   prints two tables in Markdown, in half an hour

Each server has one CPU, and so one thread. Its clients ask `/v1/completions` for 32 tokens behind 256, each a prompt of its own; then one client
asks two questions on one document of 2 048 tokens. Run it with a Python that has `transformers[serving]` 5.24; where it has
`llama-cpp-python[server]`, that is measured, too. The model is that of `recipes/real/fetch.sh`, a GGUF file; the first start writes it to data/real as
a directory in f32. Tables have medians of the rounds; ratios are those of the tokens a CPU-second to the first server, taken within a round.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from short_samples import ROOT, find_binary

GGUF = ROOT / "data/real/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = ROOT / "data/real/SmolLM2-135M-Instruct"
# Clients at a time, and requests in all.
LOADS = ((1, 4), (4, 8), (16, 16))
PROMPT, NEW, DOCUMENT = 256, 32, 2048
THINGS = "lamp boat rope stone river market garden tower letter window bridge horse".split()
VERBS = "found lost carried painted mended sold kept broke followed remembered".split()


def write_model():
    """The GGUF file as a directory that Transformers serves."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, unpacked = {"gguf_file": GGUF.name}, GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(GGUF.parent, **where, quantization_config=unpacked, dtype="float32").save_pretrained(MODEL)
    AutoTokenizer.from_pretrained(GGUF.parent, **where).save_pretrained(MODEL)


def servers(binary):
    kvtune = [binary, "serve", "--threads", 1, "--no-access-log", "--device", "cpu", "--port"]
    transformers = [pathlib.Path(sys.executable).parent / "transformers", "serve", MODEL, "--device", "cpu", "--host", "127.0.0.1", "--port"]
    known = {
        "Transformers": (transformers, ()),
        "Transformers, continuous batching": (transformers, ("--continuous-batching",)),
        "kvtune": (kvtune, (MODEL,)),
        "kvtune, `h2o`, 128 slots": (kvtune, (MODEL, "--policy", "h2o", "--cache-length", 128, "--set", "kv_cache.chunk_size=64")),
        "kvtune, Q4_1": (kvtune, (GGUF,)),
    }
    if importlib.util.find_spec("llama_cpp"):
        llama = [sys.executable, "-m", "llama_cpp.server", "--model", GGUF, "--n_threads", 1, "--n_ctx", 4096, "--port"]
        known["llama-cpp-python, Q4_1"] = (llama, ())
    return known


def text(tokens, seed):
    """Sentences of so many tokens, nearly."""
    words = random.Random(seed)
    return " ".join(f"The {words.choice(THINGS)} {words.choice(VERBS)} the {words.choice(THINGS)}." for _ in range(tokens // 6))


def ask(port, prompt, new):
    """Tokens of an answer."""
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)["usage"]["completion_tokens"]


def cpu_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(process, work):
    """What `work` returns, with its seconds and the server's CPU-seconds."""
    began, began_cpu = time.perf_counter(), cpu_seconds(process)
    result = work()
    return result, time.perf_counter() - began, cpu_seconds(process) - began_cpu


def measure(start, seed):
    """Figures of a server: by load requests, tokens, seconds and CPU-seconds; and CPU-seconds of a first and a second question on a document."""
    command, more = start
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    affinity = lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # noqa: E731
    with tempfile.TemporaryFile() as log:
        words = [str(word) for word in (*command, port, *more)]
        process = subprocess.Popen(words, env=environment, preexec_fn=affinity, stdout=log, stderr=log)
        try:
            while True:
                try:
                    ask(port, "The", 4)
                    break
                except OSError as error:
                    if isinstance(error, urllib.error.HTTPError):
                        raise
                    if process.poll() is not None:
                        log.seek(0)
                        sys.exit(f"servers.py: {' '.join(words)}: {log.read().decode()[-2000:]}")
                    time.sleep(0.5)
            figures = {}
            for clients, requests in LOADS:
                prompts = [text(PROMPT, f"{seed} {clients} {number}") for number in range(requests)]
                with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                    work = lambda: sum(pool.map(lambda prompt: ask(port, prompt, NEW), prompts))  # noqa: E731
                    figures[clients] = (requests, *timed(process, work))
            document = text(DOCUMENT, seed)
            questions = (f"{document}\nWho {verb} the {THINGS[0]}?" for verb in VERBS[:2])
            figures["questions"] = [timed(process, lambda: ask(port, question, 1))[2] for question in questions]
            return figures
        finally:
            process.terminate()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvtune", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names of the servers that are measured")
    arguments = parser.parse_args()
    if not MODEL.exists():
        write_model()
    known = {name: start for name, start in servers(arguments.kvtune or find_binary()).items() if arguments.only in name}
    rounds = [{name: measure(start, seed) for name, start in known.items()} for seed in range(arguments.rounds)]
    first = next(iter(known))
    print("| server |" + "".join(f" {clients}: requests/s, tokens/s, ratio |" for clients, _ in LOADS) + "\n|---|---|---|---|")
    for name in known:
        cells = []
        for clients, _ in LOADS:
            found = [of_round[name][clients] for of_round in rounds]
            figures = [[requests / seconds, tokens / seconds] for requests, tokens, seconds, _ in found]
            per_cpu = [[of_round[which][clients][1] / of_round[which][clients][3] for which in (name, first)] for of_round in rounds]
            answered, written = (statistics.median(figure) for figure in zip(*figures))
            cells.append(f"{answered:.2f}, {written:.1f}, {statistics.median(own / other for own, other in per_cpu):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| server | CPU-seconds of the first question | of the second | ratio |\n|---|---|---|---|")
    for name in known:
        found = [of_round[name]["questions"] for of_round in rounds]
        one, two = (statistics.median(figure) for figure in zip(*found))
        print(f"| {name} | {one:.2f} | {two:.2f} | {statistics.median(b / a for a, b in found):.3f} |")


if __name__ == "__main__":
    main()
