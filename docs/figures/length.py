#!/usr/bin/env python3
"""Peak memory and time of a training step by sequence length: kvtune beside full attention.

    docs/figures/length.py measure [--kvtune BINARY]   writes length.tsv, in about ten minutes on two cores
    docs/figures/length.py draw                        writes length.svg from length.tsv

Both files are beside this script. The steps are those of `recipes/bench/step.toml`, on random tokens.

kvtune: the recipe as it is, with the policy `h2o` and a fixed cache.
full:   the policy `dense`, a cache as long as the sequence, and one cell of all layers and all chunks. That is plain training with
        full attention: one graph of the whole sequence. The forward phase of kvtune runs without autograd and is not part of plain
        training, so `draw` leaves its time out.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECIPE = ROOT / "recipes/bench/step.toml"
TABLE, PICTURE = HERE / "length.tsv", HERE / "length.svg"

LENGTHS = {"kvtune": [1024 << i for i in range(8)], "full": [1024 << i for i in range(6)]}
RUNS = 2
# Longer steps take so long that what a first step costs beyond a later one no longer counts.
LONGEST_WITH_WARM_UP = 16384
COLUMNS = ["method", "tokens", "run", "step_seconds", "step_cpu_seconds", "forward_seconds", "forward_cpu_seconds", "peak_bytes"]


# Measuring.


def find_binary():
    """The newest binary of this checkout."""
    built = [path for kind in ("release", "debug") if (path := ROOT / "target" / kind / "kvtune").exists()]
    if not built:
        sys.exit("no binary in target/: run `make build`, or name one with --kvtune")
    return max(built, key=lambda path: path.stat().st_mtime)


def run_bench(binary, method, tokens, chunk_size):
    """The objects that `kvtune bench` prints, by kind."""
    warm_up = 1 if tokens <= LONGEST_WITH_WARM_UP else 0
    command = [binary, "bench", "--recipe", RECIPE, "--tokens", tokens, "--steps", 1, "--warmup", warm_up, "--random-weights"]
    command += ["--set", "grad.keep_graph=none"]
    command += ["--threads", 2, "--device", "cpu", "--format", "json"]
    if method == "full":
        chunks = math.ceil(tokens / chunk_size)
        command += ["--set", "kv_cache.policy=dense", "--set", f"kv_cache.cache_length={tokens}"]
        command += ["--set", f"grad.chunks_per_cell={chunks}"]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=True)
    return {line["kind"]: line for line in map(json.loads, done.stdout.splitlines())}


def cpu_name():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def describe(setup, recipe):
    """What the figures hold for, one line each."""
    model = json.loads((RECIPE.parent / recipe["model"]["path"] / "config.json").read_text())
    cache = recipe["kv_cache"]
    return {
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores shared with other programs, {setup['threads']} threads",
        "software": f"kvtune {setup['version']}, libtorch {setup['libtorch']}, {setup['dtype']}",
        "model": f"{model['num_hidden_layers']} layers of {model['hidden_size']}, {model['num_attention_heads']} query heads, "
        f"{model['num_key_value_heads']} KV heads of {model['head_dim']}, MLP of {model['intermediate_size']}, "
        f"vocabulary of {model['vocab_size']}; LoRA r {recipe['lora']['r']} on all projections, a loss at every token",
        "kvtune": f"policy {cache['policy']}, {cache['cache_length']} slots, chunks of {cache['chunk_size']}",
        "full": "policy dense, cache as long as the sequence, one cell of all layers and chunks",
    }


def measure(binary):
    recipe = tomllib.loads(RECIPE.read_text())
    rows, setup = [], None
    # The two in turn at each length, so that other work on the machine meets both alike.
    for tokens in sorted({tokens for lengths in LENGTHS.values() for tokens in lengths}):
        for run in range(1, RUNS + 1):
            for method in LENGTHS:
                if tokens not in LENGTHS[method]:
                    continue
                found = run_bench(binary, method, tokens, recipe["kv_cache"]["chunk_size"])
                setup = found["setup"]
                figure = {name: value["median"] for name, value in found["summary"].items() if isinstance(value, dict)}
                times = [f"{figure[name]:.3f}" for name in COLUMNS[3:7]]
                rows.append([method, tokens, run, *times, int(figure["peak_resident_bytes"])])
                print(*rows[-1], sep="\t", flush=True)
    head = [f"# {name}: {text}" for name, text in describe(setup, recipe).items()]
    lines = ["\t".join(map(str, row)) for row in [COLUMNS, *rows]]
    TABLE.write_text("\n".join(head + lines) + "\n")


# Drawing.

WIDTH, HEIGHT = 880, 416
PANEL_WIDTH, PANEL_HEIGHT, TOP = 330, 225, 78
LEFTS = [62, 490]
INK, MUTED, GRID, PAPER, BORDER = "#1f2328", "#59636e", "#e4e8ec", "#ffffff", "#d1d9e0"
COLOURS = {"kvtune": "#0969da", "full": "#bc4c00"}
NAMES = {"kvtune": "kvtune", "full": "full attention"}


def read_table():
    """What the figures hold for, and by method the points (tokens, MB, milliseconds a token): of each the smallest of its runs."""
    lines = TABLE.read_text().splitlines()
    about = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    columns, *rows = [line.split("\t") for line in lines if not line.startswith("# ")]
    best = {}
    for row in (dict(zip(columns, row)) for row in rows):
        seconds = float(row["step_cpu_seconds"])
        if row["method"] == "full":
            seconds -= float(row["forward_cpu_seconds"])
        tokens = int(row["tokens"])
        point = (int(row["peak_bytes"]) / 1e6, 1e3 * seconds / tokens)
        key = (row["method"], tokens)
        best[key] = tuple(map(min, point, best.get(key, point)))
    points = {method: [(tokens, *best[m, tokens]) for m, tokens in sorted(best) if m == method] for method in LENGTHS}
    return about, points


def round_up(value):
    """The top of an axis and the step of its lines: at least four lines, at round numbers."""
    step = 10.0 ** math.floor(math.log10(value))
    step = next(step * part for part in (1, 0.5, 0.25, 0.2, 0.1) if value / (step * part) >= 3.2)
    return step * math.ceil(value / step), step


def text(x, y, words, size=12, colour=INK, anchor="start", weight="normal"):
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    # The outline keeps lines of the grid away from the letters.
    outline = f'stroke="{PAPER}" stroke-width="4" paint-order="stroke" stroke-linejoin="round"'
    return f'<text {place} fill="{colour}" {outline}>{words}</text>'


def panel(left, title, column, points):
    tokens = [point[0] for line in points.values() for point in line]
    low, high = math.log2(min(tokens)), math.log2(max(tokens))
    top, step = round_up(max(point[column] for line in points.values() for point in line))
    bottom = TOP + PANEL_HEIGHT

    def x(count):
        return left + PANEL_WIDTH * (math.log2(count) - low) / (high - low)

    def y(value):
        return bottom - PANEL_HEIGHT * value / top

    out = [text(left, TOP - 18, title, 14, weight="600")]
    for i in range(round(top / step) + 1):
        value = i * step
        out.append(f'<line x1="{left}" y1="{y(value):.1f}" x2="{left + PANEL_WIDTH}" y2="{y(value):.1f}" stroke="{GRID}"/>')
        out.append(text(left - 8, y(value) + 4, f"{value:g}", 11, MUTED, "end"))
    for count in sorted(set(tokens)):
        out.append(text(x(count), bottom + 18, f"{count // 1024}k", 11, MUTED, "middle"))
    out.append(text(left + PANEL_WIDTH / 2, bottom + 37, "tokens of the sequence", 11, MUTED, "middle"))
    for method, line in points.items():
        colour = COLOURS[method]
        path = " ".join(f"{x(point[0]):.1f},{y(point[column]):.1f}" for point in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round"/>')
        out += [f'<circle cx="{x(p[0]):.1f}" cy="{y(p[column]):.1f}" r="3.5" fill="{colour}"/>' for p in line]
        last = line[-1]
        figure = f"{last[column]:,.0f} MB".replace(",", " ") if column == 1 else f"{last[column]:.2f} ms"
        if method == "full":
            # Left of the curve's end, which rises steeply.
            out.append(text(x(last[0]) - 12, y(last[column]) - 9, NAMES[method], 13, colour, "end", "600"))
            out.append(text(x(last[0]) - 12, y(last[column]) + 7, figure, 12, colour, "end"))
        else:
            # Above the end of the curve, which is flat.
            out.append(text(x(last[0]), y(last[column]) - 28, NAMES[method], 13, colour, "end", "600"))
            out.append(text(x(last[0]), y(last[column]) - 12, figure, 12, colour, "end"))
    return out


def draw():
    about, points = read_table()
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>Peak memory and time a token of a training step against sequence length: kvtune beside full attention</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="{PAPER}" stroke="{BORDER}"/>',
        text(LEFTS[0] - 38, 30, "One training step, by the length of its sequence", 16, weight="600"),
    ]
    out += panel(LEFTS[0], "peak memory of the process, MB", 1, points)
    out += panel(LEFTS[1], "CPU time a token, ms", 2, points)
    notes = [
        f"kvtune: {about['kvtune']}. Full attention: one graph of the whole sequence, without a separate forward phase.",
        f"Model: {about['model']}.",
        f"{about['machine']}; {about['software']}. The smaller of {RUNS} runs.",
    ]
    out += [text(LEFTS[0] - 38, HEIGHT - 52 + 17 * i, note, 11, MUTED) for i, note in enumerate(notes)]
    PICTURE.write_text("\n".join(out) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["measure", "draw"])
    parser.add_argument("--kvtune", type=pathlib.Path, help="the binary; default: the newest one in target/")
    arguments = parser.parse_args()
    if arguments.verb == "measure":
        measure(arguments.kvtune or find_binary())
    else:
        draw()


if __name__ == "__main__":
    main()
