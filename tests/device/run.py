"""What needs a GPU, in four parts, as one table on stdout and one archive.

Called by run.sh beside it. Needs Python alone; torch is only looked for, so that its libraries are found, and imported by ceilings.py, which is
a process of its own.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile

import kernels
import machine
import parity
import steps
from program import NotRun, Program, Skipped
from table import Table

# By part, in the order of their worth: what stands first is run first. The doctor comes before anything that reads libtorch's files, as its
# first start is to be a cold one.
PARTS = {
    "a": {"machine": machine.machine, "doctor": machine.doctor, "ceilings": machine.ceilings, "tests": parity.device_tests,
          "parity": parity.parity},
    "b": {"step-7b": steps.step_7b, "lastrec": steps.lastrec, "slice": kernels.slice_of_two_layers,
          "chunks-of-2048": steps.chunks_of_2048, "two-chunks": steps.two_chunks,
          "short-chunks": steps.short_chunks},
    "c": {"step-4b": steps.step_4b, "sanitizer": kernels.sanitizer, "lengths": steps.lengths,
          "step-4b-2048": steps.step_4b_of_2048},
    "d": {"2m": steps.longest},
}
ITEMS = {name: item for part in PARTS.values() for name, item in part.items()}
# These say themselves what a machine without a GPU has.
ANYWHERE = ("machine", "doctor")


def chosen(text):
    names = [name.strip() for name in text.lower().split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS and name not in ITEMS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"no part `{', '.join(unknown)}`: expected {', '.join([*PARTS, *ITEMS])}")
    return names


def arguments():
    inside = "; ".join(f"{letter}: {', '.join(part)}" for letter, part in PARTS.items())
    about = f"What needs a GPU, in four parts, as one table on stdout and one archive. {inside}."
    parser = argparse.ArgumentParser(prog="run.sh", description=about)
    add = parser.add_argument
    add("binary", nargs="?", help="the program `kvtune`; default: `kvtune` or `kvtune.xz` beside this script")
    add("tests", nargs="?", help="the program of the device tests; default: `device` or `device.xz` beside this script")
    add("--only", action="append", type=chosen, metavar="NAMES", help="parts by their letters, or what is in them by its name: `a,b`")
    add("--minutes", type=float, default=8, help="for each part; what does not fit is not run (default 8)")
    add("--out", help="where the archive goes; default: $OUT, else `device-run` in the current directory")
    add("--device", default="auto", help="`cuda`, `cuda:1`, `cpu` with tiny shapes; default: `cuda` where there is an NVIDIA device")
    add("--tiny", action="store_true", help="tiny shapes and no goals, to try the script itself")
    return parser, parser.parse_args()


def attempt(run, name, item):
    """One row at least, whatever happens."""
    try:
        if run.device is None and name not in ANYWHERE:
            run.needs_gpu()
        item(run)
    except Skipped as why:
        run.row(name, "", f"skipped: {why}", "skipped")
    except NotRun as why:
        run.row(name, "", str(why), "not run")
    except Exception as error:  # what follows is to be run whatever this was
        run.row(name, "", f"{type(error).__name__}: {error}", False)


def planned(asked):
    """Lists of what shares one part's time, and what the archive is called after them."""
    names = [name for names in asked.only or [list(PARTS)] for name in names]
    single = [name for name in names if name not in PARTS]
    lists = [list(PARTS[name]) for name in names if name in PARTS] + ([single] if single else [])
    letters = "".join(name.upper() for name in names if name in PARTS)
    return lists, "-".join(word for word in [letters, *single] if word)


def main():
    # Whoever ends this script ends what it has begun, and gets the table so far.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser, asked = arguments()
    lists, called = planned(asked)
    out = pathlib.Path(asked.out or os.environ.get("OUT") or "device-run").resolve()
    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"device-{called}.tar.xz"
    table = Table()
    with tempfile.TemporaryDirectory(prefix="kvtune-device-", ignore_cleanup_errors=True) as work:
        run = Program(asked, table, pathlib.Path(work))
        if run.binary is None or not run.binary.is_file():
            parser.error(f"there is no program `{run.binary or 'kvtune'}`: name it, or put it beside this script (`make device-pack`)")
        if run.is_tiny:
            run.row("shapes", "", "tiny: no figure below is of the model or the length that its row names", "note")
        try:
            for names in lists:
                run.begin_part()
                for name in names:
                    attempt(run, name, ITEMS[name])
                    # Also for whoever ends this script where it can do no more.
                    run.pack(archive)
        finally:
            print(table.text())
            print(f"{table.summary()}; logs in {archive}", flush=True)
            run.pack(archive)
    return 1 if table.count(False) else 0


if __name__ == "__main__":
    sys.exit(main())
