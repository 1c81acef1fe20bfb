"""Runs that are killed or asked to end at any instant, and resumed at each of their steps."""

import random
import shutil
import signal
import time

from workplace import kill, token_rows, training


def killed(place, tally, count, pool):
    """kill -9 at random instants, of the run and of every second resume; what ends at last is the uninterrupted run, to the bit."""
    began = time.monotonic()
    whole = place.finished("whole")
    length = time.monotonic() - began

    def one(number):
        run, drawn = f"killed-{number}", random.Random(number)
        child = place.begin(run)
        time.sleep(drawn.uniform(0, length))
        kill(child)
        place.ended(child)
        for _ in range(number % 2):
            if (place.path(run) / "recipe.resolved.toml").exists():
                child = place.start(["resume", run])
                time.sleep(drawn.uniform(0, length))
                kill(child)
                place.ended(child)
        ended = place.go_on(run)
        fault = ended.fault([0]) or place.difference(run, whole)
        place.remove(run)
        return fault

    tally.of("kill -9 at random instants, then resumed to the bit", pool.map(one, range(count)))


def phases(place):
    """Commands that take some seconds, each in another phase: its name, the arguments, and whether it is a run."""
    (place.path("long.jsonl")).write_text(token_rows(4, 3, 6000, 6000))
    words = " ".join(f"the words of a long document, number {n}, are read and become tokens" for n in range(400))
    (place.path("texts.jsonl")).write_text("".join('{"text": "%s %d"}\n' % (words, n) for n in range(400)))
    long = ["data.train=long.jsonl", "data.validation=long.jsonl", "kv_cache.cache_length=256", "kv_cache.chunk_size=64"]
    texts = ["data.train=texts.jsonl", 'data.format="text"', 'data.on_too_long="drop"', "data.max_seq_length=20000"]
    step = [*long, "eval.initial=false", "eval.interval=1000", "train.micro_batch_size=4"]
    # A recipe may not name validation samples twice over: the first of them is taken out of texts.
    without = place.path("recipe.toml").read_text().replace('validation = "validation.jsonl"\n', "")
    place.path("texts.toml").write_text(without)
    place.path("short.toml").write_text(without.replace("max_steps = 6", "max_steps = 2"))

    def recipe(command, file, sets=()):
        return [command, "--recipe", file, *(part for one in sets for part in ("--set", one))]

    auto = ['grad.layers_per_cell="auto"', 'grad.chunks_per_cell="auto"', *long]
    saving = ["checkpoint.intermediate_save_interval=1", "eval.interval=1000"]
    return [
        ("loading", recipe("check", "recipe.toml"), False),
        ("tokenising", recipe("check", "texts.toml", texts), False),
        ("planning", recipe("plan", "recipe.toml", auto), False),
        ("a step", training("of-step", step), True),
        ("a validation", training("of-validation", [*long, "eval.interval=1"]), True),
        ("saving", training("of-saving", saving), True),
        ("evaluate", ["evaluate", "whole", "--policy", "dense,h2o,tova,knorm"], False),
        ("verify", recipe("verify", "recipe.toml", ["kv_cache.cache_length=64", 'model.dtype="f64"']) + ["--every-tiling"], False),
    ]


def asked_to_end(place, tally, count, pool):
    """SIGTERM at random instants of each phase: the end comes within 10 seconds, with the code that tells it, and a run can go on from there."""
    place.finished("whole")
    every = phases(place)
    for name, arguments, is_run in every:
        began = time.monotonic()
        child = place.start(arguments)
        ended = place.ended(child, 40)
        length = min(time.monotonic() - began, 40)
        if ended.code != 0 and length < 40:
            tally.failed(f"SIGTERM while {name}", ended.words[-300:])
            continue

        def one(number, arguments=arguments, is_run=is_run, name=name, length=length):
            own = list(arguments)
            if is_run:
                own[own.index("--out") + 1] = run = f"asked-{name.split()[-1]}-{number}"
            child = place.start(own)
            time.sleep(random.Random(number).uniform(0, length))
            asked = time.monotonic()
            kill(child, signal.SIGTERM)
            ended = place.ended(child, 60)
            took = time.monotonic() - asked
            fault = ended.fault([0, 143, -signal.SIGTERM])
            if took > 10:
                fault = f"{took:.1f} s to end"
            if is_run and ended.code == 143:
                # A run that said so has saved its last whole step: what is there is whole.
                text = place.output(["inspect", run]) if place.path(run).exists() else ""
                if "damaged" in text or "not whole" in text:
                    fault = fault or f"a checkpoint is not whole: {text[-300:]}"
            if is_run:
                place.remove(run)
            return fault, took

        outcomes = list(pool.map(one, range(count)))
        longest = max(took for _, took in outcomes)
        tally.of(f"SIGTERM while {name}, the longest {longest:.1f} s", [fault for fault, _ in outcomes])


def resumed_anywhere(place, tally, count, pool):
    """A run that is resumed after each of its steps ends as the whole one."""
    sets = [f"train.max_steps={count}", "eval.interval=7"]
    whole = place.finished("steps", sets)

    def one(step):
        run = f"steps-{step}"
        shutil.copytree(place.path("steps"), place.path(run))
        ended = place.run(["resume", run, "--from", f"step-{step:06}"])
        # What came later is set aside, and made anew.
        fault = ended.fault([0]) or place.difference(run, whole)
        place.remove(run)
        return fault

    tally.of("resumed after each step, to the bit", pool.map(one, range(1, count + 1)))
    place.remove("steps")
