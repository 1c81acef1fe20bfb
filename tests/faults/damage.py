"""Checkpoints with a flipped byte or cut short, and numbers that are not finite wherever they can come in."""

import json
import math
import os
import random
import shutil
import struct

from workplace import training

# Damaged checkpoints of a run: so many are looked at by one process.
AT_A_TIME = 100


def noticed(place, tally, flips, cuts, pool):
    """Every flipped byte and every truncation of a checkpoint's files is seen by `inspect`, and some of each by `resume`."""
    place.remove("sound")
    # A checkpoint of each step, as one that has the name of another's is refused for that alone.
    steps = [f"train.max_steps={AT_A_TIME + 1}", "train.epochs=1000", "eval.interval=1000", "checkpoint.intermediate_save_keep=1000"]
    place.finished("sound", steps)
    sound = f"step-{AT_A_TIME + 1:06}"
    names = sorted(os.listdir(place.path("sound/step-000002")))

    def damaged(target, number, cuts_short):
        """Damages one byte of a checkpoint."""
        drawn = random.Random(number * 2 + cuts_short)
        file = target / names[number % len(names)]
        data = bytearray(file.read_bytes())
        at = drawn.randrange(len(data))
        if cuts_short:
            del data[at:]
        else:
            data[at] ^= 1 << drawn.randrange(8)
        file.write_bytes(data)
        return f"{file.name} at {at} of {file.stat().st_size}"

    def batch(of):
        first, last, cuts_short = of
        run = f"damaged-{first}-{cuts_short}"
        shutil.copytree(place.path("sound"), place.path(run), ignore=shutil.ignore_patterns("best", "final"))
        what = {}
        for number in range(first, last):
            name = f"step-{number - first + 1:06}"
            what[name] = damaged(place.path(run) / name, number, cuts_short)
        found = json.loads(place.output(["inspect", run, "--format", "json"]) or '{"checkpoints": []}')["checkpoints"]
        states = {one["name"]: one["damage"] for one in found}
        place.remove(run)
        if states.get(sound, "absent") is not None:
            return ["the sound one is not whole"] * (last - first)
        # A file that is cut to nothing or renamed may make it no checkpoint at all: it is not among them, and not whole.
        return [None if states.get(name, "absent") is not None else f"{name}: {where}" for name, where in what.items()]

    def batches(count, cuts_short):
        return [(first, min(first + AT_A_TIME, count), cuts_short) for first in range(0, count, AT_A_TIME)]

    for count, cuts_short, name in [(flips, 0, "flipped bytes"), (cuts, 1, "truncations")]:
        outcomes = [fault for part in pool.map(batch, batches(count, cuts_short)) for fault in part]
        tally.of(f"{name} of checkpoints noticed", outcomes)

    def resumed(number):
        run = f"resumed-{number}"
        others = shutil.ignore_patterns("best", "final", *(f"step-{step:06}" for step in range(3, AT_A_TIME + 2)))
        shutil.copytree(place.path("sound"), place.path(run), ignore=others)
        where = damaged(place.path(run) / "step-000002", number, number % 2)
        ended = place.run(["resume", run, "--from", "step-000002"])
        place.remove(run)
        fault = ended.fault([2, 3])
        return f"{where}: {fault}" if fault else None

    tally.of("`resume --from` a damaged checkpoint refused", pool.map(resumed, range(max(flips // 200, 1))))
    place.remove("sound")


def tensors_of(path):
    """The offsets of the tensors of a safetensors file in f32: name, first byte, last byte."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + length])
    head.pop("__metadata__", None)
    return [(name, 8 + length + one["data_offsets"][0], 8 + length + one["data_offsets"][1]) for name, one in sorted(head.items())]


def with_numbers(path, target, changes):
    """Copies a file of tensors with some numbers replaced: places and values."""
    data = bytearray(path.read_bytes())
    for at, value in changes:
        data[at:at + 4] = struct.pack("<f", value)
    target.write_bytes(data)


def all_finite(path):
    data = path.read_bytes()
    return all(
        all(math.isfinite(value) for (value,) in struct.iter_unpack("<f", data[first:last]))
        for _, first, last in tensors_of(path)
    )


STRANGE = [math.nan, math.inf, -math.inf]


def ways(place, count):
    """The ways in which numbers that are not finite come in: a name, settings, and which codes are right."""
    model = place.path("model")
    tensors = tensors_of(model / "model.safetensors")
    adapter_tensors = tensors_of(place.path("small/final/adapter_model.safetensors"))
    found = []
    for number in range(count):
        drawn, kind = random.Random(number), number % 5
        if kind in (0, 1):
            # A weight, anywhere: all of them act on the loss, the embedding as the output matrix too.
            name, first, last = drawn.choice(tensors)
            own = place.path(f"model-{number}")
            shutil.copytree(model, own)
            at = first + 4 * drawn.randrange((last - first) // 4)
            with_numbers(model / "model.safetensors", own / "model.safetensors", [(at, drawn.choice(STRANGE))])
            policy = ["stop", "skip", "rollback"][number % 3]
            found.append((f"{name} of the model, {policy}", [f"model.path={own.name}", f'train.on_non_finite="{policy}"'], [3, 5]))
        elif kind == 2:
            rate = 10.0 ** drawn.uniform(25, 38)
            found.append((f"a learning rate of {rate:.0e}", [f"optimizer.learning_rate={rate:e}", "optimizer.warmup_steps=0"], [2, 5]))
        elif kind == 3:
            name, first, last = drawn.choice(adapter_tensors)
            own = place.path(f"adapter-{number}")
            shutil.copytree(place.path("small/final"), own)
            at = first + 4 * drawn.randrange((last - first) // 4)
            file = "adapter_model.safetensors"
            with_numbers(place.path("small/final") / file, own / file, [(at, drawn.choice(STRANGE))])
            for leave in ["MANIFEST.json", "state.json", "optimizer.safetensors"]:
                (own / leave).unlink(missing_ok=True)
            found.append((f"{name} of an adapter", [f"model.adapter={own.name}"], [3, 5]))
        else:
            policy = ["skip", "rollback"][number // 5 % 2]
            settings = [f'train.on_non_finite="{policy}"', "train.max_loss=1e-3", f"train.max_skipped_steps={1 + number % 4}"]
            found.append((f"every loss above the largest, {policy}", settings, [5]))
    return found


def not_finite(place, tally, count, pool):
    """What is not finite ends a run with 5, or is refused before; nothing that is saved has such a number."""
    place.remove("small")
    place.finished("small", ["train.max_steps=1"])

    def one(way):
        number, (name, settings, codes) = way
        run = f"strange-{number}"
        ended = place.ended(place.start(training(run, settings)))
        fault = ended.fault(codes)
        for file in sorted(place.path(run).glob("*/adapter_model.safetensors")):
            if not all_finite(file):
                fault = fault or f"{file.parent.name} holds numbers that are not finite"
        place.remove(run)
        return f"{name}: {fault}" if fault else None

    tally.of("numbers that are not finite", pool.map(one, enumerate(ways(place, count))))
    for own in [*place.place.glob("model-*"), *place.place.glob("adapter-*"), place.path("small")]:
        shutil.rmtree(own)
