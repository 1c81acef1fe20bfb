"""Runs what needs a GPU, each part with a limit of its own, and prints one table: asked, seen, verdict.

Called by run.sh beside it. Needs Python alone; torch is only looked for, so that its libraries are found.
"""

import argparse
import array
import contextlib
import glob
import importlib.util
import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECIPES = ROOT / "recipes" / "bench"
GIB, GB, MB = 1 << 30, 1e9, 1e6
# Less than this is no time to begin anything.
LEAST = 10


def arguments():
    about = "What needs a GPU: doctor, parity, steps of large models, memory by length."
    parser = argparse.ArgumentParser(prog="run.sh", description=about)
    add = parser.add_argument
    add("binary", help="the program `kvtune`")
    add("tests", nargs="?", help="the binary of the device tests (`cargo test --release --test device --no-run` names it)")
    add("--only", action="append", choices=list(PARTS), metavar="NAME", help="one part, or several: " + ", ".join(PARTS))
    add("--quick", action="store_true", help="doctor and parity alone")
    add("--minutes", type=float, default=9.5, help="for everything together; what does not fit is not run (default 9.5)")
    add("--out", help="where logs go; default: $OUT, else `device-run` in the current directory")
    add("--device", default="cuda", help="as kvtune has it (default cuda)")
    add("--tiny", action="store_true", help="tiny shapes and no goals, to try the script itself, with `--device cpu` too")
    return parser.parse_args()


def environment():
    """With the libraries of the active Python's torch, if it has one."""
    found = importlib.util.find_spec("torch")
    env = dict(os.environ)
    if found and found.submodule_search_locations:
        torch = pathlib.Path(list(found.submodule_search_locations)[0])
        folders = [str(torch / "lib"), *sorted(glob.glob(str(torch.parent / "nvidia" / "*" / "lib")))]
        env["LD_LIBRARY_PATH"] = ":".join(folders + [path for path in [env.get("LD_LIBRARY_PATH")] if path])
    env["KVTUNE_FIXTURES"] = str(ROOT / "tests" / "fixtures")
    return env


class NotRun(Exception):
    """What was asked could not be looked at; says why."""


class Run:
    def __init__(self, asked):
        self.asked = asked
        self.binary = str(pathlib.Path(asked.binary).resolve())
        self.tests = asked.tests and str(pathlib.Path(asked.tests).resolve())
        self.out = pathlib.Path(asked.out or os.environ.get("OUT") or "device-run").resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.env = environment()
        self.ends = time.monotonic() + 60 * asked.minutes
        self.rows = []
        self.benches = {}

    def left(self):
        return self.ends - time.monotonic()

    def row(self, what, asked, seen, verdict):
        """A line of the table; `verdict` is a truth, or None where nothing was asked."""
        word = {True: "pass", False: "FAIL", None: "–"}.get(verdict, verdict)
        self.rows.append((what, asked, seen, word))
        print(f"[{60 * self.asked.minutes - self.left():5.0f} s] {what}: {seen} ({word})", flush=True)

    def call(self, name, command, limit):
        """Exit code and output of a command, with its errors in the log beside; whatever it has begun ends with it."""
        limit = min(limit, self.left())
        if limit < LEAST:
            raise NotRun("no time left")
        out, err = self.out / f"{name}.out", self.out / f"{name}.err"
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=self.env, start_new_session=True, cwd=self.out)
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                raise NotRun(f"not done within {limit:.0f} s") from None
            finally:
                # Of a group of its own it would outlive this script where that is interrupted.
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return code, out.read_text(errors="replace"), err.read_text(errors="replace")

    def kvtune(self, name, arguments, limit, device=None):
        return self.call(name, [self.binary, *arguments, "--device", device or self.asked.device], limit)


def reason(err):
    """The error that a program ended with, in one line."""
    lines = [line for line in err.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1][:160]


def lines_of(out):
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def doctor(run):
    begun = time.monotonic()
    code, out, err = run.kvtune("doctor", ["doctor", "--json", "--scratch-dir", str(run.out)], 90)
    seconds = time.monotonic() - begun
    checks = [line for line in lines_of(out) if line["kind"] == "check"]
    for check in checks:
        run.row(f"doctor: {check['name']}", "", check["found"], {"ok": True, "failed": False}.get(check["state"]))
    seen = f"{len(checks)} checks in {seconds:.1f} s" + (f"; {reason(err)}" if code != 0 else "")
    run.row("doctor", "what is promised works, ≤ 20 s", seen, code == 0 and seconds <= 20)


PARITY_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3,
    "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.1,
}
PARITY_RECIPE = """\
model = { path = "model", dtype = "f32" }
lora = { r = 8, alpha = 16 }
data = { format = "tokens", train = "train.jsonl", validation_fraction = 0 }
kv_cache = { policy = "h2o", cache_length = 64, chunk_size = 24 }
grad = { layers_per_cell = 2, chunks_per_cell = 2 }
train = { micro_batch_size = 2 }
"""


def parity(run):
    if run.tests:
        try:
            rust_tests(run)
        except NotRun as why:
            run.row("device tests", "all pass, none skipped", f"not run: {why}", False)
    place = run.out / "parity"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(PARITY_CONFIG))
    (place / "recipe.toml").write_text(PARITY_RECIPE)
    rows = [[1 + (i * 7 + row * 31 + i * i % 13) % 500 for i in range(length)] for row, length in enumerate((201, 170))]
    (place / "train.jsonl").write_text("".join(json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in rows))
    if not (place / "model").exists():
        make = ["init-model", "--config", str(place / "config.json"), "--out", str(place / "model")]
        code, _, err = run.kvtune("parity-model", make, 60)
        if code != 0:
            raise NotRun(reason(err))

    def verify(name, more, device=None):
        return run.kvtune(name, ["verify", "--recipe", str(place / "recipe.toml"), *more], 120, device)

    code, out, err = verify("verify", [])
    seen = out.strip().splitlines()[-1] if code == 0 and out.strip() else reason(err)
    run.row("verify: gradient beside masked dense autograd, f64", "proved, 1e-12", seen, code == 0)

    def dump(name, settings, device=None, follows=None):
        folder = place / name
        more = ["--dump", str(folder), *(part for setting in settings for part in ("--set", setting))]
        more += ["--replay-log", str(place / follows / "replay_log.safetensors")] if follows else []
        code, _, err = verify(f"dump-{name}", more, device)
        if code != 0:
            raise NotRun(reason(err))
        return folder

    cpu = dump("cpu", [], "cpu")
    here = dump("f32", [], None, "cpu")
    measures = (("gradients", relative_error, "worst matrix of the gradient"), ("logits", largest_difference, "logits"))
    for file, measure, what in measures:
        found = tensors(here / f"{file}.safetensors")
        error = worst(measure(found[name], expected) for name, expected in tensors(cpu / f"{file}.safetensors").items())
        run.row(f"f32 beside the CPU's f32: {what}", "≤ 1e-4", f"{error:.1e}", error <= 1e-4)
    narrow = dump("bf16", ["model.dtype=bf16"], None, "cpu")
    near = cosine(tensors(narrow / "gradients.safetensors"), tensors(here / "gradients.safetensors"))
    run.row("bf16 beside f32: cosine of the whole gradient", "≥ 0.999", f"{near:.6f}", near >= 0.999)
    for name, settings, asked in (("deterministic", ["train.deterministic=true"], "the same bits"), ("repeated", [], "")):
        first, second = (dump(f"{name}-{turn}", settings) for turn in (1, 2))
        files = ("gradients.safetensors", "logits.safetensors", "replay_log.safetensors")
        same = all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
        what = f"two runs {'with `train.deterministic`' if settings else 'without it'}: choices, logits, gradients"
        run.row(what, asked, "the same bits" if same else "other bits", same if asked else None)


def rust_tests(run):
    code, out, err = run.call("tests", [run.tests, "--test-threads", "1", "--nocapture"], 180)
    results = [line for line in out.splitlines() if line.startswith("test result:")]
    skipped = sum(line.startswith("skipped:") for line in err.splitlines())
    seen = f"{results[-1] if results else reason(err)}; {skipped} skipped"
    run.row("device tests", "all pass, none skipped", seen, code == 0 and skipped == 0)


def tensors(path):
    """F32 tensors of a safetensors file by name."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "F32":
                raise NotRun(f"`{name}` in {path.name} is {entry['dtype']}")
            found[name] = array.array("f", data[8 + length + begin:8 + length + end])
    return found


def norm(numbers):
    return math.sqrt(sum(x * x for x in numbers))


def worst(errors):
    """The largest; NaN, which is within no bound, where there is one."""
    errors = list(errors)
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def differences(found, expected):
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} numbers, expected {len(expected)}")
    return [x - y for x, y in zip(found, expected)]


def relative_error(found, expected):
    return norm(differences(found, expected)) / norm(expected)


def largest_difference(found, expected):
    return worst(abs(difference) for difference in differences(found, expected))


def cosine(found, expected):
    pairs = [(x, y) for name in expected for x, y in zip(found[name], expected[name])]
    return sum(x * y for x, y in pairs) / (norm(x for x, _ in pairs) * norm(y for _, y in pairs))


def bench(run, name, recipe, tokens, limit, warmup=1, settings=()):
    """The summary of a bench, each figure's median. What was run once is not run again, nor what failed."""
    if name not in run.benches:
        try:
            run.benches[name] = benched(run, name, recipe, tokens, limit, warmup, settings)
        except (NotRun, ValueError) as why:
            run.benches[name] = why
    if isinstance(run.benches[name], Exception):
        raise run.benches[name]
    return run.benches[name]


def benched(run, name, recipe, tokens, limit, warmup, settings):
    if run.asked.tiny:
        recipe, tokens = "step.toml", max(64, tokens // 1024)
        settings = [*settings, "kv_cache.cache_length=64", "kv_cache.chunk_size=32"]
    command = ["bench", "--recipe", str(RECIPES / recipe), "--tokens", str(tokens), "--steps", "1", "--warmup", str(warmup),
               "--random-weights", "--format", "json", *(part for setting in settings for part in ("--set", setting))]
    code, out, err = run.kvtune(name, command, limit)
    lines = {line["kind"]: line for line in lines_of(out)}
    if code != 0 or "summary" not in lines:
        raise ValueError(f"exit code {code}: {reason(err)}")
    figures = {key: value["median"] for key, value in lines["summary"].items() if isinstance(value, dict)}
    # Before anything is trained.
    loss = next(line["loss"] for line in lines_of(out) if line["kind"] == "step")
    return {**figures, "attention": lines["setup"]["attention"], "tokens": lines["step"]["tokens"], "loss": loss}


STEP_PARTS = ("forward", "head", "replay", "recompute", "backward", "optimizer")


def step(run, name, what, recipe, tokens, goal):
    try:
        found = bench(run, name, recipe, tokens, 200)
    except NotRun as why:
        run.row(what, f"≤ {goal} s a step", str(why), "not run")
        found = bench(run, f"{name}-quarter", recipe, tokens // 4, 100, warmup=0)
        what, goal = f"a quarter of it: {what}", math.inf
    seconds = found["step_seconds"]
    rates = f"{found['tokens_per_second']:.0f} tokens/s, {found['flops_per_second'] / 1e12:.1f} TFLOP/s"
    seen = f"{seconds:.2f} s, {rates}, {100 * found['gemm_share']:.0f} % of a plain product"
    asked = f"≤ {goal} s a step" if math.isfinite(goal) else ""
    run.row(what, asked, seen, run.goal(seconds <= goal) if asked else None)
    parts = ", ".join(f"{part} {found[part + '_seconds']:.2f}" for part in STEP_PARTS)
    run.row(f"{what}: seconds by part", "", f"{parts}; attention: {found['attention']}", None)
    run.row(f"{what}: memory", "", memory(found), None)


def memory(found):
    device = found.get("peak_device_bytes")
    host = f"{found.get('peak_resident_bytes', math.nan) / GIB:.2f} GiB on the host"
    return (f"{device / GB:.2f} GB on the device, " if device else "") + host


BIG, BIG_TOKENS = "qwen2.5-7b.toml", 131_072


def step_7b(run):
    step(run, "step-7b", "Qwen2.5-7B, 131 072 tokens, h2o, C 16 384", BIG, BIG_TOKENS, 20)


def step_4b(run):
    step(run, "step-4b", "Qwen3-4B's sizes, 2 × 65 536 tokens, h2o, C 32 768", "qwen3-4b.toml", 65_536, 32)


def policies(run):
    scored = bench(run, "step-7b", BIG, BIG_TOKENS, 200)["step_seconds"]
    recent = bench(run, "lastrec-7b", BIG, BIG_TOKENS, 200, settings=["kv_cache.policy=lastrec"])["step_seconds"]
    more = 100 * (scored / recent - 1)
    seen = f"{scored:.2f} s beside {recent:.2f} s: {more:+.1f} %"
    run.row("h2o beside lastrec, C 16 384", "≤ 8 % more time", seen, run.goal(more <= 8))


def lengths(run):
    short = bench(run, "step-7b", BIG, BIG_TOKENS, 200)
    run.row("memory at 131 072 tokens", "", memory(short), None)
    for tokens, name in ((524_288, "512k"), (1_048_576, "1m")):
        long = bench(run, f"step-{name}", BIG, tokens, 300, warmup=0, settings=["grad.undo_log=int8"])
        run.row(f"memory at {tokens:,} tokens".replace(",", " "), "", f"{memory(long)}; {long['step_seconds']:.1f} s", None)
        if "peak_device_bytes" in long:
            growth = (long["peak_device_bytes"] - short["peak_device_bytes"]) / (long["tokens"] - short["tokens"]) * 10_000
            run.row("device memory for each further 10 000 tokens", "≤ 1 MB", f"{growth / MB:.2f} MB", run.goal(growth <= MB))


def graphs(run):
    # Several rows, so that there are replays, and more tokens than slots.
    small = ["kv_cache.chunk_size=256", "grad.layers_per_cell=7"]
    plain, captured = (bench(run, f"chunks-of-256-{name}", BIG, 32_768, 200, settings=[*small, f"grad.cuda_graphs={name}"])
                       for name in ("false", "true"))
    seen = f"{captured['loss']:.7f} and {plain['loss']:.7f}"
    run.row("CUDA graphs: loss beside the one without", "the same", seen, plain["loss"] == captured["loss"])
    for part in ("forward", "replay", "step"):
        with_graphs, without = captured[f"{part}_seconds"], plain[f"{part}_seconds"]
        run.row(f"CUDA graphs, chunks of 256: {part}", "", f"{with_graphs:.2f} s beside {without:.2f} s", None)


def step_2m(run):
    what = "2 097 152 tokens in one step, int8 undo log"
    if run.left() < 480 and not run.asked.tiny:
        raise NotRun("it may take 8 minutes: ask for it alone, with `--only 2m`")
    found = bench(run, "step-2m", BIG, 2_097_152, 540, warmup=0, settings=["grad.undo_log=int8"])
    seconds = found["step_seconds"]
    device, host = (found.get(f"peak_{memory}_bytes", math.inf) for memory in ("device", "resident"))
    asked = "≤ 450 s, ≤ 40 GB on the device, ≤ 100 GiB on the host"
    holds = seconds <= 450 and device <= 40 * GB and host <= 100 * GIB
    run.row(what, asked, f"{seconds:.0f} s, {memory(found)}", run.goal(holds))


# By their worth: what stands first is run first.
PARTS = {
    "doctor": doctor, "parity": parity, "step-7b": step_7b, "policies": policies, "step-4b": step_4b, "lengths": lengths,
    "graphs": graphs, "2m": step_2m,
}
QUICK = ("doctor", "parity")


def table(rows):
    header = ("what", "asked", "seen", "verdict")
    width = [max(len(row[column]) for row in [header, *rows]) for column in range(4)]
    told = ["| " + " | ".join(cell.ljust(size) for cell, size in zip(row, width)) + " |" for row in [header, *rows]]
    told.insert(1, "|" + "|".join("-" * (size + 2) for size in width) + "|")
    return "\n".join(told)


def main():
    # Whoever ends this script ends what it has begun.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(arguments())
    # Tiny shapes have no goals.
    run.goal = lambda holds: None if run.asked.tiny else holds
    for name in run.asked.only or (QUICK if run.asked.quick else PARTS):
        try:
            PARTS[name](run)
        except NotRun as why:
            run.row(name, "", str(why), "not run")
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
            run.row(name, "", f"{type(error).__name__}: {error}", False)
    told = table(run.rows)
    print("\n" + told)
    (run.out / "table.md").write_text(told + "\n")
    failed = sum(row[3] == "FAIL" for row in run.rows)
    print(f"\n{len(run.rows)} rows, {failed} failed, {sum(row[3] == 'not run' for row in run.rows)} not run; logs in {run.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
