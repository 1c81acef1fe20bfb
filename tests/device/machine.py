"""What a machine is: driver, memory, limits, versions; and what `kvtune doctor` says of it, cold and warm."""

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import resource
import shutil
import sys
import time

from program import GIB, HERE, NotRun, Skipped

ASKED_OF_DRIVER = ("name", "driver_version", "memory.total", "memory.free", "compute_cap", "power.limit", "clocks.max.sm", "clocks.max.mem",
                   "pcie.link.gen.max", "pcie.link.width.max", "mig.mode.current", "ecc.mode.current", "persistence_mode")
TOOLS = ("nsys", "ncu", "compute-sanitizer", "nvcc")
WHEELS = ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvrtc")


def machine(run):
    run.row("system", "", f"{platform.platform()}, Python {platform.python_version()}", None)
    run.row("processor", "", f"{model_of_cpu()}; {len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process", None)
    run.row("memory of the host", "", memory(), None)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    room = shutil.disk_usage(run.work).free / GIB
    run.row("limits", "", f"locked memory: {'unlimited' if locked == resource.RLIM_INFINITY else f'{locked / GIB:.2f} GiB'}; control group: "
            f"{group_limit('memory.max')} bytes, {group_limit('cpu.max')} of CPU; {room:.0f} GiB free in {run.work.parent}", None)
    run.row("wheels in this Python", "", ", ".join(versions()) or "none that count", None)
    found = [tool for tool in TOOLS if shutil.which(tool)]
    run.row("tools on the path", "", f"{', '.join(found) or 'none'}; without {', '.join(t for t in TOOLS if t not in found) or 'none'}", None)
    driver(run)


def driver(run):
    what = "driver"
    if not shutil.which("nvidia-smi"):
        return run.row(what, "", "skipped: there is no `nvidia-smi`", "skipped")
    said = run.call("nvidia-smi", ["nvidia-smi", f"--query-gpu={','.join(ASKED_OF_DRIVER)}", "--format=csv,noheader"], 30)
    if said.code != 0:
        return run.row(what, "", (said.out + said.err).strip() or said.reason(), False if run.device == "cuda" else None)
    for line in said.out.splitlines():
        values = [value.strip() for value in line.split(",")]
        run.row(what, "", "; ".join(f"{key} {value}" for key, value in zip(ASKED_OF_DRIVER, values)), None)
    run.call("nvidia-smi-q", ["nvidia-smi", "-q"], 30)


def text_of(path):
    with contextlib.suppress(OSError):
        return pathlib.Path(path).read_text(errors="replace")
    return ""


def model_of_cpu():
    lines = [line for line in text_of("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return lines[0].split(":", 1)[1].strip() if lines else platform.machine()


def memory():
    lines = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines() if ":" in line)
    size = {key: int(lines[key].split()[0]) * 1024 / GIB for key in ("MemTotal", "MemAvailable") if key in lines}
    return ", ".join(f"{key} {value:.1f} GiB" for key, value in size.items()) or "unknown"


def group_limit(name):
    """Of the control group that this process sees as its root."""
    return " ".join(text_of(f"/sys/fs/cgroup/{name}").split()) or "unknown"


def versions():
    for wheel in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{wheel} {importlib.metadata.version(wheel)}"


def doctor(run):
    """Twice: the first start reads libtorch from the disk and compiles the kernels, the second finds both."""
    for turn, asked in (("cold", "what is promised works"), ("warm", "what is promised works, ≤ 20 s")):
        begun = time.monotonic()
        said = run.kvtune(f"doctor-{turn}", ["doctor", "--json", "--scratch-dir", str(run.work)], 90)
        seconds = time.monotonic() - begun
        if said.code is None:
            raise NotRun(f"doctor, {turn}: {said.reason()}")
        checks = [line for line in said.lines() if line.get("kind") == "check"]
        for check in checks if turn == "cold" else ():
            verdict = {"ok": True, "failed": False}.get(check["state"])
            hint = f"; {check['hint']}" if check["state"] == "failed" and check.get("hint") else ""
            run.row(f"doctor: {check['name']}", "", check["found"] + hint, verdict)
        seen = f"{len(checks)} checks in {seconds:.1f} s" + (f"; {said.reason()}" if said.code != 0 else "")
        run.row(f"doctor, {turn}", asked, seen, said.code == 0 and (turn == "cold" or seconds <= 20))


def ceilings(run):
    """PyTorch's own rates at the shapes of a step, by a process of its own."""
    run.needs_gpu()
    if importlib.util.find_spec("torch") is None:
        raise Skipped("this Python has no torch")
    said = run.call("ceilings", [sys.executable, HERE / "ceilings.py", "--device", run.device], 110)
    lines = said.lines()
    for line in lines:
        run.row(f"PyTorch: {line['what']}", "", line.get("seen") or line["error"], None if "seen" in line else "not run")
    if said.code != 0 or not lines:
        run.row("ceilings", "", said.reason(), "not run" if said.code is None else False)
