"""The kernels of a step one by one, under a profiler; and kvtune's own under a checker of their memory accesses. Both where installed."""

import csv
import json
import shutil
import time
from collections import defaultdict

from program import NotRun, Skipped
from steps import BIG, RECIPES, bench, command, tell

TOKENS, LAYERS = 32_768, 2
# Rows of kernels; what is below them is a thousandth of the time and less.
MOST_ROWS = 30
# A profiler that takes kernels one by one takes some milliseconds for each.
MOST_LAUNCHES = 8000


def slice_of_two_layers(run):
    """First without a profiler: it says how long the slice takes, and leaves compiled kernels and chosen ways to attend for the next."""
    what = f"{LAYERS} layers of Qwen2.5-7B, 32 768 tokens"
    settings = slice_settings(run)
    tell(run, what, bench(run, "slice", BIG, TOKENS, 90, settings=settings))
    run.needs_gpu()
    for tool, profile in (("nsys", by_nsys), ("ncu", by_ncu)):
        if not shutil.which(tool):
            run.row(f"{what}: kernels by {tool}", "", f"skipped: there is no `{tool}`", "skipped")
            continue
        try:
            kernels = profile(run, command(run, BIG, TOKENS, 0, settings))
        except (NotRun, ValueError, OSError, KeyError) as why:
            run.row(f"{what}: kernels by {tool}", "", f"{type(why).__name__}: {why}", "not run")
            continue
        return tell_kernels(run, f"kernel by {tool}", kernels)


def slice_settings(run):
    config = json.loads((RECIPES / ("config.json" if run.is_tiny else "qwen2.5-7b/config.json")).read_text())
    place = run.work / "slice"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return [f"model.path={place}", f"grad.layers_per_cell={LAYERS}"]


def tell_kernels(run, what, kernels):
    """`kernels` is (name, launches, nanoseconds)."""
    whole = sum(spent for *_, spent in kernels)
    run.row(f"{what}: all", "", f"{sum(count for _, count, _ in kernels)} launches, {whole / 1e6:.1f} ms", None)
    for name, count, spent in sorted(kernels, key=lambda kernel: -kernel[2])[:MOST_ROWS]:
        run.row(f"{what}: {name[:160]}", "", f"{count} ×, {spent / 1e6:.2f} ms, {100 * spent / whole:.1f} %", None)


def by_nsys(run, bench_command):
    report = run.work / "slice.nsys-rep"
    before = ["nsys", "profile", "--trace=cuda", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true", "-o", report]
    said = run.kvtune("slice-nsys", bench_command, 90, before=before)
    if said.code != 0:
        raise ValueError(said.reason())
    told = run.call("slice-nsys-kernels", ["nsys", "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", report], 60)
    return nsys_kernels(told.out.splitlines())


def nsys_kernels(lines):
    begin = next((i for i, line in enumerate(lines) if "Total Time (ns)" in line), None)
    if begin is None:
        raise ValueError("no table of kernels in its report")
    rows = [row for row in csv.DictReader(lines[begin:]) if (row.get("Instances") or "").isdigit()]
    return [(row["Name"], int(row["Instances"]), float(row["Total Time (ns)"])) for row in rows]


def by_ncu(run, bench_command):
    log = run.logs / "slice-ncu.csv"
    before = ["ncu", "--csv", "--log-file", log, "--metrics", "gpu__time_duration.sum", "--clock-control", "none", "--target-processes", "all",
              "--launch-count", str(MOST_LAUNCHES)]
    said = run.kvtune("slice-ncu", bench_command, 120, before=before)
    if said.code is None:
        raise NotRun(said.reason())
    return ncu_kernels(log.read_text(errors="replace").splitlines())


NANOSECONDS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}


def ncu_kernels(lines):
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise ValueError("no table of kernels in its log: " + (lines or ["it is empty"])[-1])
    counts = defaultdict(lambda: [0, 0.0])
    for row in csv.DictReader(line for line in lines[begin:] if line.startswith('"')):
        if row["Metric Name"] == "gpu__time_duration.sum":
            counts[row["Kernel Name"]][0] += 1
            counts[row["Kernel Name"]][1] += float(row["Metric Value"].replace(",", "")) * NANOSECONDS[row["Metric Unit"]]
    return [(name, count, spent) for name, (count, spent) in counts.items()]


# Of the device tests in kernels.rs, for which the checkers take several times as long as the tests alone.
CHECKED_SECONDS = 150


def sanitizer(run):
    run.needs_gpu()
    if not shutil.which("compute-sanitizer"):
        raise Skipped("there is no `compute-sanitizer`")
    if run.tests is None:
        raise Skipped("the program of the device tests is not here")
    listed = run.call("kernel-tests", [run.tests, "--list", "kernels::"], 30).out.splitlines()
    tests = [line.removesuffix(": test") for line in listed if line.endswith(": test")]
    ends = time.monotonic() + CHECKED_SECONDS
    for tool in ("memcheck", "racecheck"):
        for test in tests:
            what = f"compute-sanitizer, {tool}: {test}"
            name = f"{tool}-{test.split('::')[-1]}"
            checked = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", run.tests, test, "--exact", "--test-threads", "1"]
            try:
                said = run.call(name, checked, min(60, ends - time.monotonic()), together=True)
            except NotRun as why:
                run.row(what, "no errors", str(why), "not run")
                continue
            told = [line.strip("= ") for line in said.out.splitlines() if "SUMMARY" in line or "Device not supported" in line]
            if said.code is None or not any("SUMMARY" in line for line in told):
                run.row(what, "no errors", "; ".join(told) or said.reason(), "not run")
            else:
                run.row(what, "no errors", "; ".join(told), said.code == 0)
