#!/usr/bin/env python3
"""Faults from outside: drives the built binary on a tiny model, kills it, fails its system calls, damages its files, and prints n/n.

    tests/faults/faults.py                        everything, at its full count: two hours on two cores
    tests/faults/faults.py --only kill,calls      some of it
    tests/faults/faults.py --part 0.05            everything, a twentieth of each

Ends with 0 where everything held. It needs Python 3.9 and a C compiler, nothing else.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import calls
import damage
import interruptions
import ranks
from workplace import ROOT, Workplace


class Tally:
    """What held and what did not."""

    def __init__(self):
        self.failures = 0

    def of(self, name, outcomes):
        """Counts the outcomes, each none or what is wrong."""
        began, outcomes = time.monotonic(), list(outcomes)
        wrong = [one for one in outcomes if one]
        self.failures += len(wrong)
        print(f"{len(outcomes) - len(wrong):6}/{len(outcomes)}  {name}  ({time.monotonic() - began:.0f} s)", flush=True)
        for one in wrong[:8]:
            print(f"          {one}", flush=True)
        if len(wrong) > 8:
            print(f"          … and {len(wrong) - 8} more", flush=True)

    def failed(self, name, why):
        self.of(name, [why])


# Each with its full count.
SECTIONS = {
    "kill": lambda p, t, n, pool: interruptions.killed(p, t, n(200), pool),
    "signal": lambda p, t, n, pool: interruptions.asked_to_end(p, t, n(100), pool),
    "steps": lambda p, t, n, pool: interruptions.resumed_anywhere(p, t, n(40), pool),
    "calls": lambda p, t, n, pool: calls.failing(p, t, n, pool),
    "sockets": lambda p, t, n, pool: calls.without_sockets(p, t, pool),
    "left": lambda p, t, n, pool: calls.left_behind(p, t, n(40), pool),
    "damage": lambda p, t, n, pool: damage.noticed(p, t, n(10_000), n(1_000), pool),
    "ranks": lambda p, t, n, pool: ranks.killed(p, t, n(50), pool),
    "network": lambda p, t, n, pool: ranks.cut_off(p, t, n(3)),
    "finite": lambda p, t, n, pool: damage.not_finite(p, t, n(100), pool),
}


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    binary = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    asked.add_argument("--binary", default=binary / "debug/kvtune")
    asked.add_argument("--only", default=",".join(SECTIONS), help="sections, parted by commas: " + ", ".join(SECTIONS))
    asked.add_argument("--part", type=float, default=1.0, help="the part of each count that is made")
    asked.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    asked = asked.parse_args()
    names = asked.only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        sys.exit(f"faults.py: no section {unknown}; there are {', '.join(SECTIONS)}")
    place = tempfile.mkdtemp(prefix="kvtune-faults-")
    tally = Tally()
    try:
        with ThreadPoolExecutor(asked.jobs) as pool:
            for name in names:
                began = time.monotonic()
                SECTIONS[name](Workplace(asked.binary, place), tally, lambda full: max(1, round(full * asked.part)), pool)
                print(f"          {name}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
