"""A folder with a tiny model, data and a recipe; runs of the binary in it, and what they leave."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Ragged sequences with dropout and accumulation; every step is saved, every second validated, the best is replaced on the way.
RECIPE = """
[model]
path = "model"
[lora]
r = 2
alpha = 4
dropout = 0.1
target_modules = ["q_proj", "v_proj", "down_proj"]
[data]
format = "tokens"
train = "train.jsonl"
validation = "validation.jsonl"
[kv_cache]
policy = "h2o"
cache_length = 16
chunk_size = 4
[train]
micro_batch_size = 2
gradient_accumulation_steps = 2
epochs = 40
max_steps = 6
seed = 7
[optimizer]
learning_rate = 1e-2
[eval]
interval = 2
initial = true
[checkpoint]
save_interval = 3
intermediate_save_interval = 1
intermediate_save_keep = 50
"""

# What a line of metrics has that no two runs have in common; `check` is a hash of the others, too, which the binary looks at itself.
OF_THE_MACHINE = ["seconds", "tokens_per_second", "peak_memory", "idle", "check"]


@dataclass
class Ended:
    """How a process ended. The code of one that a signal has ended is negative."""

    code: int
    words: str
    seconds: float

    def fault(self, codes):
        """What is wrong with how it ended; none where nothing is."""
        if self.code not in codes:
            return f"ended with {self.code}, expected {codes}: {self.words[-400:]}"
        if len(self.words) > 16384:
            return f"{len(self.words)} bytes on standard error"
        if self.code > 0 and self.code < 128 and "error: " not in self.words:
            return f"ended with {self.code} without a word: {self.words[-400:]}"
        if "panicked" in self.words or "has a defect" in self.words:
            return f"a defect: {self.words[-400:]}"
        return None


class Workplace:
    """Where runs are made. `place` is emptied first."""

    def __init__(self, binary, place, samples=8):
        self.binary = Path(binary).resolve()
        self.place = Path(place).resolve()
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        for name in ["tmp", "home"]:
            (self.place / name).mkdir()
        shutil.copytree(ROOT / "tests/fixtures/model-qwen2", self.place / "model")
        (self.place / "train.jsonl").write_text(token_rows(samples, 1, 9, 48))
        (self.place / "validation.jsonl").write_text(token_rows(2, 2, 9, 48))
        (self.place / "recipe.toml").write_text(RECIPE)

    def path(self, name):
        return self.place / name

    def start(self, arguments, more=None, inside=()):
        """Starts the binary on one thread of the CPU, `inside` another command; its words go to a file, so that no pipe holds it up."""
        environment = {name: os.environ[name] for name in ["PATH", "LD_LIBRARY_PATH"] if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.place / "tmp"), "HOME": str(self.place / "home")}
        environment |= more or {}
        # Beside the place, not in it: no fault is to strike the words.
        words = Path(f"{self.place}-words-{os.urandom(6).hex()}")
        with open(words, "wb") as file:
            child = subprocess.Popen(
                [*inside, self.binary, *map(str, arguments), "--device", "cpu"],
                cwd=self.place, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
            )
        child.words, child.began = words, time.monotonic()
        return child

    def ended(self, child, limit=300):
        """Waits for the end of a process; one that does not end within the limit counts as killed."""
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        words = child.words.read_text(errors="replace")
        child.words.unlink()
        return Ended(child.returncode, words, time.monotonic() - child.began)

    def run(self, arguments, more=None):
        return self.ended(self.start(arguments, more))

    def output(self, arguments):
        """What the binary prints."""
        environment = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(self.place / "tmp"))
        return subprocess.run(
            [self.binary, *map(str, arguments)], cwd=self.place, env=environment, capture_output=True, text=True
        ).stdout

    def begin(self, run, sets=(), more=None):
        return self.start(training(run, sets), more)

    def finished(self, run, sets=()):
        """A run to its end, and what it left."""
        ended = self.ended(self.begin(run, sets))
        assert ended.code == 0, ended.words
        return self.left(run)

    def go_on(self, run, sets=(), more=None):
        """What a person does after any interruption: resume, or begin again where nothing had begun."""
        if self.path(run).joinpath("recipe.resolved.toml").exists():
            return self.run(["resume", run], more)
        shutil.rmtree(self.path(run), ignore_errors=True)
        return self.ended(self.begin(run, sets, more))

    def left(self, run):
        """Everything that a run must leave to the bit: its checkpoints' files, and its metrics without times."""
        found = {}
        directory = self.path(run)
        for checkpoint in sorted(filter(is_checkpoint, os.listdir(directory))):
            for file in sorted((directory / checkpoint).iterdir()):
                if file.name == "README.md":  # a card has its run's name
                    continue
                found[f"{checkpoint}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
        found["latest"] = (directory / "latest").read_text().strip()
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        found["metrics"] = [without_times(line) for line in lines]
        return found

    def difference(self, run, expected):
        """What a run left otherwise than expected; none where it is all the same."""
        try:
            found = self.left(run)
        except OSError as error:
            return f"{run}: {error}"
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                return f"{run}: `{name}` differs"
        cut = [name for name in os.listdir(self.path(run)) if re.search(r"\.tmp-[0-9a-f]{16}$", name)]
        return f"{run}: {cut} was left" if cut else None

    def remove(self, run):
        shutil.rmtree(self.path(run), ignore_errors=True)


def training(run, sets=()):
    return ["finetune-lora", "--recipe", "recipe.toml", "--out", run, *(part for one in sets for part in ("--set", one))]


def is_checkpoint(name):
    return name in ("best", "final") or re.fullmatch(r"step-\d+", name) is not None


def without_times(line):
    return {key: value for key, value in json.loads(line).items() if key not in OF_THE_MACHINE}


def token_rows(count, seed, shortest, longest):
    """Rows of token ids, one target in four left out."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [drawn.randint(1, 200) for _ in range(drawn.randint(shortest, longest))]
        labels = [-100 if drawn.random() < 0.25 else one for one in ids[:-1]] + ids[-1:]
        rows.append(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return "".join(rows)


def kill(child, number=signal.SIGKILL):
    """Sends a signal to a process that may have ended."""
    if child.poll() is None:
        child.send_signal(number)
