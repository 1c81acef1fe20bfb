"""The programs under test: where they are, how they are called, what they say beside their results, and the archive of it all."""

import contextlib
import glob
import importlib.util
import io
import json
import lzma
import os
import pathlib
import shutil
import signal
import subprocess
import tarfile
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Less than this is no time to begin anything; and what the table and the archive take at the end.
LEAST, PACKING = 5, 5
GIB, GB, MB = 1 << 30, 1e9, 1e6
# Of a log, from its end: nobody reads more, and the archive stays small.
LONGEST_LOG = 4 << 20
# What verbs say of every run of theirs.
USUAL = ("error: ", "hint: ", "help: ", "wrote the dump to ")


class NotRun(Exception):
    """What was asked could not be looked at; says why."""


class Skipped(Exception):
    """This machine lacks what it takes; says what."""


class Said(NamedTuple):
    code: int | None  # None where it was ended at its limit
    out: str
    err: str
    seconds: float

    def lines(self):
        """The objects among the lines of its output; one that was cut off is none."""
        found = []
        for line in self.out.splitlines():
            with contextlib.suppress(ValueError):
                found += [json.loads(line)] if line.startswith("{") else []
        return found

    def reason(self):
        """The error that it ended with, in one line."""
        if self.code is None:
            return f"not done within {self.seconds:.0f} s"
        lines = [line for line in self.err.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"exit code {self.code}, and no word"])[-1][:300]


def has_gpu():
    """Whether the machine shows an NVIDIA device, as `kvtune` looks for one."""
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/nvidiactl") or glob.glob("/dev/dxg"))


def environment(work):
    """With the libraries of the active Python's torch before what was there, which stays: it may be where the driver is."""
    found = importlib.util.find_spec("torch")
    env = dict(os.environ)
    if found and found.submodule_search_locations:
        torch = pathlib.Path(list(found.submodule_search_locations)[0])
        folders = [str(torch / "lib"), *sorted(glob.glob(str(torch.parent / "nvidia" / "*" / "lib")))]
        env["LD_LIBRARY_PATH"] = ":".join(folders + [path for path in [env.get("LD_LIBRARY_PATH")] if path])
    env["KVTUNE_FIXTURES"] = str(ROOT / "tests" / "fixtures")
    # Kernels are compiled and ways to attend are measured anew, whatever this machine has seen before.
    env["KVTUNE_CACHE_DIR"] = str(work / "cache")
    return env


def unpacked(name, work):
    """The program that lies beside this script, as it is or packed; None where there is none."""
    plain, packed = HERE / name, HERE / f"{name}.xz"
    if plain.is_file():
        return plain
    if not packed.is_file():
        return None
    made = work / name
    with lzma.open(packed) as source, open(made, "wb") as target:
        shutil.copyfileobj(source, target)
    made.chmod(0o755)
    return made


class Program:
    """`kvtune` and the device tests, on one device, within the time of a part."""

    def __init__(self, asked, table, work):
        self.asked, self.table, self.work = asked, table, work
        self.is_tiny = asked.tiny or asked.device == "cpu"
        # None where there is no GPU and nobody insists on one.
        self.device = asked.device if asked.device != "auto" else "cuda" if has_gpu() else None
        self.binary = asked.binary and pathlib.Path(asked.binary).resolve() or unpacked("kvtune", work)
        self.tests = asked.tests and pathlib.Path(asked.tests).resolve() or unpacked("device", work)
        self.logs = work / "logs"
        self.logs.mkdir()
        (work / "cache").mkdir(mode=0o700)
        self.env = environment(work)
        if self.device == "cpu":
            self.env["CUDA_VISIBLE_DEVICES"] = ""
        self.benches = {}
        self.notes = set()
        self.begin_part()

    def begin_part(self):
        self.ends = time.monotonic() + 60 * self.asked.minutes - PACKING

    def left(self):
        return self.ends - time.monotonic()

    def row(self, what, asked, seen, verdict):
        self.table.row(what, asked, seen, verdict)

    def goal(self, holds):
        """A verdict on what was asked of full shapes: tiny ones have no goals."""
        return None if self.is_tiny else holds

    def needs_gpu(self):
        if self.device is None or self.device == "cpu":
            raise Skipped("it needs a GPU" + ("" if self.device else ", and this machine shows no NVIDIA device"))

    def call(self, name, command, limit, together=False):
        """What a command said, and its logs for the archive. At its limit it is ended, with whatever it has begun. `together` has its
        errors in their place among its output."""
        limit = min(limit, self.left())
        if limit < LEAST:
            raise NotRun("no time was left")
        self.table.going_on(name)
        out, err = self.logs / f"{name}.out", self.logs / f"{name}.err"
        begun = time.monotonic()
        with open(out, "wb") as stdout, open(err, "wb") as stderr:
            process = subprocess.Popen([str(part) for part in command], stdout=stdout, stderr=subprocess.STDOUT if together else stderr,
                                       stdin=subprocess.DEVNULL, env=self.env, start_new_session=True, cwd=self.work)
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Of a group of its own it would outlive this script where that is interrupted.
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return Said(code, out.read_text(errors="replace"), err.read_text(errors="replace"), time.monotonic() - begun)

    def kvtune(self, name, arguments, limit, device=None, before=()):
        said = self.call(name, [*before, self.binary, *arguments, "--device", device or self.device or "auto"], limit)
        self.tell_notes(name, said)
        return said

    def tell_notes(self, name, said):
        """Each line that the program wrote beside its results as a row, once: how it attends, what is not pinned, what kernel it lacks."""
        for line in said.err.splitlines():
            note = line.strip().replace(str(self.work), "…")
            if note and note not in self.notes and not note.startswith(USUAL):
                self.notes.add(note)
                self.row(f"note of {name}", "", note, "note")

    def pack(self, into):
        """The table and all logs so far, in place of an earlier archive."""
        made = into.with_name(f".{into.name}.{os.getpid()}")
        folder = into.name.removesuffix(".tar.xz")
        try:
            with tarfile.open(made, "w:xz") as archive:
                add(archive, f"{folder}/table.md", self.table.text().encode())
                for log in sorted(self.logs.iterdir()):
                    if log.stat().st_size:
                        add(archive, f"{folder}/{log.name}", end_of(log))
            made.replace(into)
        finally:
            made.unlink(missing_ok=True)


def add(archive, name, data):
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(data), int(time.time())
    archive.addfile(entry, io.BytesIO(data))


def end_of(log):
    with open(log, "rb") as file:
        cut = max(0, log.stat().st_size - LONGEST_LOG)
        file.seek(cut)
        return (b"(the beginning is left out)\n" if cut else b"") + file.read()
