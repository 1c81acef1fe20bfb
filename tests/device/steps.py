"""Steps of large models by `kvtune bench`: their time and memory by part, beside each other and by length."""

import math

from program import GB, GIB, MB, ROOT, NotRun

RECIPES = ROOT / "recipes" / "bench"
PARTS = ("forward", "head", "replay", "recompute", "backward", "optimizer")
BIG, OTHER = "qwen2.5-7b.toml", "qwen3-4b.toml"
BIG_TOKENS, OTHER_TOKENS = 131_072, 65_536
# What a process takes before its first step.
START = 20


def bench(run, name, recipe, tokens, limit, warmup=1, settings=(), more=()):
    """Figures of a step, the median of each. What was run once is not run again, nor what failed."""
    asked = command(run, recipe, tokens, warmup, settings, more)
    if tuple(asked) not in run.benches:
        try:
            run.benches[tuple(asked)] = figures(run.kvtune(name, asked, limit), 0 if run.is_tiny else warmup)
        except (NotRun, ValueError) as why:
            run.benches[tuple(asked)] = why
    found = run.benches[tuple(asked)]
    if isinstance(found, Exception):
        raise found
    return found


def command(run, recipe, tokens, warmup, settings, more=()):
    if run.is_tiny:
        # Little work for a process, and still more tokens than slots. Many of these are then the same command, which is run once.
        recipe, tokens, warmup = "step.toml", 128 if tokens <= BIG_TOKENS else 256, 0
        settings = [setting for setting in settings if not setting.startswith(("kv_cache.chunk_size", "model.", "train."))]
        settings += ["kv_cache.cache_length=64", "kv_cache.chunk_size=32"]
    return ["bench", "--recipe", str(RECIPES / recipe), "--tokens", str(tokens), "--steps", "1", "--warmup", str(warmup), "--random-weights",
            "--format", "json", *more, *(part for setting in settings for part in ("--set", setting))]


def figures(said, warmup):
    lines = {line["kind"]: line for line in said.lines()}
    steps = [line for line in said.lines() if line["kind"] == "step"]
    if said.code is None and not steps:
        raise NotRun(said.reason())
    if said.code not in (0, None) or not steps:
        raise ValueError(said.reason())
    if "summary" in lines:
        found = {key: value["median"] for key, value in lines["summary"].items() if isinstance(value, dict)}
        how = "" if warmup else " (the first step of a process)"
    else:
        # It was ended at its limit: what it has printed by then counts.
        found = {key: value for key, value in steps[-1].items() if isinstance(value, float)}
        how = f" (the first step of a process; {said.reason()})"
    memory = {line["memory"]: line for line in said.lines() if line["kind"] == "memory"}
    return {**found, "how": how, "attention": lines["setup"]["attention"], "tokens": steps[0]["tokens"], "loss": steps[0]["loss"],
            "foretold": lines.get("forecast", {}), "memory": memory}


def tell(run, what, found, goal=None):
    """Time, its parts, and memory of a step."""
    seconds = found["step_seconds"]
    rates = f"{found['tokens_per_second']:.0f} tokens/s, {found['flops_per_second'] / 1e12:.1f} TFLOP/s"
    seen = f"{seconds:.2f} s, {rates}, {100 * found['gemm_share']:.0f} % of a plain product{found['how']}"
    run.row(what, f"≤ {goal} s a step" if goal else "", seen, run.goal(seconds <= goal) if goal else None)
    parts = ", ".join(f"{part} {found[part + '_seconds']:.2f}" for part in PARTS)
    waited = "".join(f"; of it {found[key]:.2f} {words}" for key, words in
                     (("copy_wait_seconds", "for copies"), ("store_copy_seconds", "in stores")) if key in found)
    run.row(f"{what}: seconds by part", "", f"{parts}{waited}; attention: {found['attention']}", None)
    run.row(f"{what}: memory", "", memory(found), None)
    for side, profile in found["memory"].items():
        rows = sorted(((row["bytes"], row["part"]) for row in profile["parts"] if row["bytes"]), reverse=True)
        listed = ", ".join(f"{part} {size / GB:.3f}" for size, part in rows)
        run.row(f"{what}: memory of the {side} at its peak, in {profile['peak_in']}, GB", "", listed, None)


def memory(found):
    device, foretold = found.get("peak_device_bytes"), found["foretold"]
    words = [f"{device / GB:.2f} GB on the device"] if device else []
    words += [f"foretold {foretold['device_bytes'] / GB:.2f} GB"] if device and foretold.get("device_bytes") else []
    words += [f"{found.get('peak_resident_bytes', math.nan) / GIB:.2f} GiB on the host"]
    words += [f"foretold {foretold['process_bytes'] / GIB:.2f} GiB"] if foretold.get("process_bytes") else []
    of_device, of_host = (found["memory"].get(side, {}) for side in ("device", "host"))
    words += [f"{of_host['pinned_bytes'] / GIB:.2f} GiB pinned"] if "pinned_bytes" in of_host else []
    words += [f"{of_device[key]:.0f} {words}" for key, words in
              (("allocation_retries", "retries of the allocator"), ("allocation_failures", "failures of it")) if of_device.get(key)]
    return ", ".join(words)


def full_or_quarter(run, name, what, recipe, tokens, limit, goal):
    try:
        tell(run, what, bench(run, name, recipe, tokens, limit, more=["--profile-memory"]), goal)
    except NotRun as why:
        run.row(what, f"≤ {goal} s a step", str(why), "not run")
        found = bench(run, f"{name}-quarter", recipe, tokens // 4, 100, warmup=0, more=["--profile-memory"])
        tell(run, f"a quarter of it: {what}", found)


WHAT_7B, WHAT_4B = "Qwen2.5-7B, 131 072 tokens, h2o, C 16 384", "Qwen3-4B's sizes, 2 × 65 536 tokens, h2o, C 32 768"


def step_7b(run):
    full_or_quarter(run, "step-7b", WHAT_7B, BIG, BIG_TOKENS, 150, 20)


def step_4b(run):
    full_or_quarter(run, "step-4b", WHAT_4B, OTHER, OTHER_TOKENS, 150, 32)


def lastrec(run):
    recent = bench(run, "lastrec", BIG, BIG_TOKENS, 120, settings=["kv_cache.policy=lastrec"], more=["--profile-memory"])
    tell(run, WHAT_7B.replace("h2o", "lastrec"), recent)
    scored = bench(run, "step-7b", BIG, BIG_TOKENS, 150, more=["--profile-memory"])
    more = 100 * (scored["step_seconds"] / recent["step_seconds"] - 1)
    seen = f"{scored['step_seconds']:.2f} s{scored['how']} beside {recent['step_seconds']:.2f} s{recent['how']}: {more:+.1f} %"
    # The first step of a process also measures and compiles.
    alike = scored["how"] == recent["how"] == ""
    run.row("h2o beside lastrec, C 16 384", "≤ 8 % more time" if alike else "", seen, run.goal(more <= 8) if alike else None)


def variant(run, name, words, recipe, tokens, settings, limit=100):
    tell(run, words, bench(run, name, recipe, tokens, limit, settings=settings))


FORMER = "kv_cache.chunk_size=2048"


def chunks_of_2048(run):
    variant(run, "chunks-of-2048", f"{WHAT_7B}, chunks of 2048", BIG, BIG_TOKENS, [FORMER])


def two_chunks(run):
    settings = [FORMER, "grad.chunks_per_cell=2"]
    variant(run, "two-chunks", f"{WHAT_7B}, chunks of 2048, two a cell", BIG, BIG_TOKENS, settings)


def short_chunks(run):
    """Where launches of kernels are the time."""
    for chunk in (64, 256):
        settings = [f"model.path={RECIPES / 'smollm2-135m'}", "model.dtype=bf16", "train.micro_batch_size=4", "grad.layers_per_cell=30",
                    "kv_cache.cache_length=512", f"kv_cache.chunk_size={chunk}"]
        variant(run, f"chunks-of-{chunk}", f"SmolLM2-135M's sizes, 4 × 4096 tokens, h2o, C 512, chunks of {chunk}", "step.toml", 4096, settings)


def step_4b_of_2048(run):
    variant(run, "step-4b-2048", f"{WHAT_4B}, chunks of 2048", OTHER, OTHER_TOKENS, [FORMER])


def spaced(tokens):
    return f"{tokens:,}".replace(",", " ")


def foretold_seconds(found, tokens):
    """With a tenth more, as a short sequence attends to fewer slots."""
    return START + 1.1 * found["step_seconds"] / found["tokens"] * tokens


def growth(run, short, long):
    if "peak_device_bytes" in long and long["tokens"] > short["tokens"]:
        found = (long["peak_device_bytes"] - short["peak_device_bytes"]) / (long["tokens"] - short["tokens"]) * 10_000
        what = f"device memory for each further 10 000 tokens, from {spaced(short['tokens'])} to {spaced(long['tokens'])}"
        run.row(what, "≤ 1 MB", f"{found / MB:.2f} MB", run.goal(found <= MB))


INT8 = "grad.undo_log=int8"


def lengths(run):
    """As long as time is left."""
    short = None
    longer = [] if run.is_tiny else [(8 * BIG_TOKENS, "1m")]
    for tokens, name in [(BIG_TOKENS, "128k"), (4 * BIG_TOKENS, "512k"), *longer]:
        what = f"Qwen2.5-7B, {spaced(tokens)} tokens, int8 undo log"
        if short and not run.is_tiny and foretold_seconds(short, tokens) > run.left():
            run.row(what, "", f"it would take about {foretold_seconds(short, tokens):.0f} s: `--only lengths`", "not run")
            continue
        found = bench(run, f"length-{name}", BIG, tokens, 400, warmup=0, settings=[INT8])
        tell(run, what, found)
        if short:
            growth(run, short, found)
        short = short or found


def longest(run):
    """What a short sequence says of the time decides how long it may be."""
    short = bench(run, "before-2m", BIG, 32_768, 100, settings=[INT8])
    tell(run, "Qwen2.5-7B, 32 768 tokens, int8 undo log", short)
    for tokens in (16 * BIG_TOKENS, 8 * BIG_TOKENS, 4 * BIG_TOKENS, BIG_TOKENS):
        what = f"Qwen2.5-7B, {spaced(tokens)} tokens, int8 undo log"
        foretold = foretold_seconds(short, tokens)
        if run.is_tiny or foretold <= run.left():
            break
        run.row(what, "", f"it would take about {foretold:.0f} s, and {run.left():.0f} s are left", "not run")
    else:
        return
    found = bench(run, f"step-of-{tokens}", BIG, tokens, math.inf, warmup=0, settings=[INT8])
    tell(run, what, found)
    growth(run, short, found)
    if tokens == 16 * BIG_TOKENS:
        device, host = (found.get(f"peak_{side}_bytes", math.inf) for side in ("device", "resident"))
        holds = found["step_seconds"] <= 450 and device <= 40 * GB and host <= 100 * GIB
        seen = f"{found['step_seconds']:.0f} s, {memory(found)}"
        run.row(f"{spaced(tokens)} tokens in one step", "≤ 450 s, ≤ 40 GB on the device, ≤ 100 GiB on the host", seen, run.goal(holds))
