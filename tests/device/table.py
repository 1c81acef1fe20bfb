"""The one table: what was looked at, what was asked of it, what was seen, and the verdict."""

import sys
import time

# What a truth is called; any other verdict is a word already: `skipped` for what this machine lacks, `not run` for what had no time.
WORDS = {True: "pass", False: "FAIL", None: "–"}
HEADER = ("what", "asked", "seen", "verdict")
LONGEST = 600


def cell(text):
    """In one line, and no end of a column."""
    text = " ".join(str(text).split()).replace("|", "\\|")
    return text if len(text) <= LONGEST else text[:LONGEST] + " …"


class Table:
    def __init__(self):
        self.rows = []
        self.begun = time.monotonic()

    def row(self, what, asked, seen, verdict):
        """A line of the table; `verdict` is a truth, None where nothing was asked, or a word."""
        self.rows.append(tuple(cell(text) for text in (what, asked, seen, WORDS.get(verdict, verdict))))

    def going_on(self, what):
        """Where the script is, for whoever watches; the table alone goes to stdout."""
        print(f"[{time.monotonic() - self.begun:5.0f} s] {what}", file=sys.stderr, flush=True)

    def count(self, verdict):
        return sum(row[3] == WORDS.get(verdict, verdict) for row in self.rows)

    def text(self):
        lines = ["| " + " | ".join(row) + " |" for row in (HEADER, *self.rows)]
        return "\n".join([lines[0], "|---" * len(HEADER) + "|", *lines[1:]]) + "\n"

    def summary(self):
        counts = ", ".join(f"{self.count(verdict)} {word}" for verdict, word in
                           ((True, "passed"), (False, "failed"), ("skipped", "skipped"), ("not run", "not run")))
        return f"{len(self.rows)} rows: {counts}; {time.monotonic() - self.begun:.0f} s"
