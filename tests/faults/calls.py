"""System calls that fail, one at a time or all from one on; sockets; files that are left behind."""

import errno
import os
import subprocess
import tempfile
import time
from pathlib import Path

from workplace import kill

HERE = Path(__file__).resolve().parent


class Interposer:
    """The library that stands between the binary and the C library."""

    def __init__(self, place):
        self.place = place
        self.library = place.path("interposer.so")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", self.library, HERE / "interposer.c", "-ldl"], check=True)
        dynamic = subprocess.run(["ldd", place.binary], capture_output=True, text=True)
        assert "libc.so" in dynamic.stdout, "the binary is not linked against the C library: no call can be caught"

    def variables(self, kind="count", calls="change", nth=0, lasting=False, counter=None, notes=None):
        found = {
            "LD_PRELOAD": str(self.library), "FAULT_DIR": str(self.place.place), "FAULT_KIND": str(kind),
            "FAULT_CALLS": calls, "FAULT_NTH": str(nth),
        }
        if lasting:
            found["FAULT_LASTING"] = "1"
        if counter:
            found["FAULT_COUNTER"] = str(counter)
        if notes:
            found["FAULT_NOTES"] = str(notes)
        return found


def counter_file(place):
    handle, name = tempfile.mkstemp(dir=place.path("tmp"))
    os.write(handle, bytes(4096))
    os.close(handle)
    return Path(name)


def counted(path):
    number = int.from_bytes(path.read_bytes()[:8], "little")
    path.unlink()
    return number


def spread(total, most):
    """`most` of the numbers from 1 to `total`, evenly; all where there are no more."""
    most = min(max(most, 1), total)
    return [1 + number * total // most for number in range(most)]


# So that every call of a run can be tried: three steps, all saved, one validated, the best replaced.
SHORT = ["train.max_steps=3", "eval.interval=2"]

# The errors, whether they last, and whether the run does not even feel them.
FAULTS = [
    ("EIO", errno.EIO, "change", False, False),
    ("ENOSPC", errno.ENOSPC, "change", False, False),
    ("EDQUOT", errno.EDQUOT, "change", False, False),
    ("EINTR", errno.EINTR, "change", False, True),
    ("a short write", "short", "change", False, True),
    ("EIO that stays", errno.EIO, "change", True, False),
    ("ENOSPC that stays", errno.ENOSPC, "change", True, False),
    ("EIO of a read", errno.EIO, "read", False, False),
    ("EINTR of a read", errno.EINTR, "read", False, True),
]


# Of those that read, which are the same ones over and over, so many.
READS = 305


def failing(place, tally, part_of, pool):
    """Every call that touches a file fails in turn: the code is right, what is saved is whole, and the run goes on from there."""
    interposer = Interposer(place)
    whole = place.finished("whole", SHORT)
    for name, kind, calls, lasting, unfelt in FAULTS:
        counter = counter_file(place)
        ended = place.ended(place.begin("counted", SHORT, interposer.variables(kind, calls, counter=counter)))
        total = counted(counter)
        assert ended.code == 0 and total > 20, (ended, total)
        most = total if calls == "change" else min(total, READS)
        place.remove("counted")

        def one(nth, kind=kind, calls=calls, lasting=lasting, unfelt=unfelt):
            run = f"call-{nth}"
            counter = counter_file(place)
            ended = place.ended(place.begin(run, SHORT, interposer.variables(kind, calls, nth, lasting, counter)))
            reached = counted(counter) >= nth
            # What is read may be the recipe, the data or the run's own.
            codes = [0] if unfelt or not reached else [0, 1, 2, 3] if calls == "read" else [0, 1]
            fault = ended.fault(codes)
            again = place.go_on(run, SHORT)
            fault = fault or again.fault([0]) or place.difference(run, whole)
            place.remove(run)
            return f"call {nth} of {total}: {fault}" if fault else None

        tally.of(f"a system call fails with {name} (of {total})", pool.map(one, spread(total, part_of(most))))


def without_sockets(place, tally, pool):
    """No command but `serve` asks for a socket."""
    interposer = Interposer(place)
    place.remove("quiet")
    commands = [
        ["check", "--recipe", "recipe.toml"],
        ["data", "recipe.toml"],
        ["plan", "--recipe", "recipe.toml"],
        ["finetune-lora", "--recipe", "recipe.toml", "--out", "quiet"],
        ["resume", "quiet"],
        ["evaluate", "quiet"],
        ["verify", "--recipe", "recipe.toml", "--set", "kv_cache.cache_length=64"],
        ["generate", "quiet", "--prompt-tokens", "1,2,3"],
        ["inspect", "quiet"],
        ["report", "quiet"],
        ["export", "quiet", "--for", "merged", "--out", "merged"],
    ]

    def one(command):
        notes = place.path("tmp") / f"sockets-{command[0]}"
        ended = place.run(command, interposer.variables(notes=notes))
        asked = [line for line in notes.read_text().splitlines() if line.startswith("socket")] if notes.exists() else ["no notes"]
        notes.unlink(missing_ok=True)
        return ended.fault([0]) or (f"{command[0]} asks for {asked}" if asked else None)

    # In order: each needs what the one before has left.
    tally.of("commands that open no socket", [one(command) for command in commands])
    for name in ["quiet", "merged"]:
        place.remove(name)


def left_behind(place, tally, count, pool):
    """After kill -9 and a new start nothing is left outside the run's directory: what was made is noted call by call."""
    interposer = Interposer(place)
    filed = ['grad.undo_log_place="file"', 'grad.layer_checkpoints_place="file"']
    shared = set(os.listdir("/dev/shm"))
    began = time.monotonic()
    whole = place.finished("filed", filed)
    length = time.monotonic() - began
    place.remove("filed")

    def one(number):
        run, notes = f"filed-{number}", place.path("tmp") / f"notes-{number}"
        scratch = place.path(f"scratch-{number}")
        scratch.mkdir()
        sets = [*filed, f'grad.scratch_dir="{scratch}"']
        more = interposer.variables(notes=notes)
        child = place.begin(run, sets, more)
        time.sleep(length * (0.2 + 0.8 * number / count))
        kill(child)
        place.ended(child)
        stays = [str(path) for path in scratch.rglob("*")]
        ended = place.go_on(run, sets, more)
        fault = ended.fault([0]) or place.difference(run, whole)
        made = {line[5:] for line in notes.read_text().splitlines() if line.startswith("made ")}
        notes.unlink()
        own = str(place.path(run))
        outside = [path for path in made if not (path + "/").startswith(own + "/") and not is_kept(path, place)]
        stays += [path for path in outside if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path))]
        stays += [str(path) for path in scratch.rglob("*")]
        place.remove(run)
        return fault or (f"left behind: {stays}" if stays else None)

    tally.of("nothing left behind after kill -9 and a new start", pool.map(one, range(count)))
    new = {name for name in set(os.listdir("/dev/shm")) - shared if "torch" in name or "kvtune" in name}
    tally.of("nothing new in /dev/shm", [f"{new}" if new else None])
    rest = [str(path) for path in place.path("tmp").rglob("*") if path.is_file()]
    tally.of("no file in TMPDIR", [f"{rest}" if rest else None])


def is_kept(path, place):
    """Devices, and what is kept for a second start on purpose: tokens and hashes beside the data, in the home directory or its cache."""
    return path.startswith(("/dev/null", "/proc/", str(place.path("home")))) or "/.kvtune" in path
