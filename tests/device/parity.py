"""Whether a device gives what the CPU gives: the device tests, and `kvtune verify` by way of its dumps."""

import array
import concurrent.futures
import json
import math
import os
import re
import struct

from program import NotRun

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3,
    "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "initializer_range": 0.1,
}
# Wide enough for every kernel: rows of 512 for norms, heads of 64 and whole chunks for cuDNN.
WIDE = {**CONFIG, "hidden_size": 512, "intermediate_size": 1024, "initializer_range": 0.05}
RECIPE = """\
model = { path = "model", dtype = "f32" }
lora = { r = 8, alpha = 16 }
data = { format = "tokens", train = "train.jsonl", validation_fraction = 0 }
kv_cache = { policy = "h2o", cache_length = 64, chunk_size = 24 }
grad = { layers_per_cell = 2, chunks_per_cell = 2 }
train = { micro_batch_size = 2 }
"""
# Files of the device tests; those without a file of their own are in main.rs.
GROUPS = ("main", "kernels", "copies")
MOST_AT_ONCE = 12


def device_tests(run):
    """Each test is a process, so that one which breaks the device's context fails alone; most of their time is the host's, so several run."""
    if run.tests is None:
        return run.row("device tests", "all pass, none skipped", "skipped: their program is not here", "skipped")
    listed = run.call("tests-list", [run.tests, "--list"], 30)
    names = [line.removesuffix(": test") for line in listed.out.splitlines() if line.endswith(": test")]
    if not names:
        return run.row("device tests", "", listed.reason(), False)

    def test(name):
        try:
            said = run.call(f"test-{name.split('::')[-1]}", [run.tests, name, "--exact", "--test-threads", "1", "--nocapture"], 180, together=True)
        except NotRun as why:
            return "not run", [str(why)]
        return result(said)

    with concurrent.futures.ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        told = dict(zip(names, pool.map(test, names)))
    for group in GROUPS:
        row_of_tests(run, f"device tests: {group}.rs", {name: of for name, of in told.items() if group_of(name) == group})
    for name, (word, text) in told.items():
        if word == "FAILED":
            run.row(f"device test {name}", "", " ".join(text), False)
        elif notes := [line for line in text if not line.startswith("skipped:")]:
            run.row(f"note of device test {name}", "", "; ".join(notes), "note")


def row_of_tests(run, what, lines):
    """How many of a file's tests passed; and of those that did not, why."""
    reasons = [line for word, text in lines.values() for line in text if line.startswith("skipped:") or word == "not run"]
    skipped = sum(any(line.startswith("skipped:") for line in text) for _, text in lines.values())
    failed = [name for name, (word, _) in lines.items() if word == "FAILED"]
    missing = sum(word == "not run" for word, _ in lines.values())
    passed = sum(word == "ok" for word, _ in lines.values()) - skipped
    seen = f"{passed} of {len(lines)} passed, {skipped} skipped, {len(failed)} failed"
    seen += (f", {missing} not run" if missing else "") + (f"; {reasons[0]}" if reasons else "")
    seen += f"; failed: {', '.join(failed)}" if failed else ""
    # A device that was asked for is not to be missed by a test.
    lacks_gpu = skipped > 0 and run.device in (None, "cpu")
    verdict = "skipped" if lacks_gpu and not failed else "not run" if missing and not failed else not failed and not skipped and len(lines) > 0
    run.row(what, "all pass, none skipped", seen, verdict)


def group_of(name):
    head = name.split("::")[0]
    return head if "::" in name and head in GROUPS else "main"


def result(said):
    """How the one test of a process ended, and what it printed; one that ended without a word has failed."""
    if said.code is None:
        return "not run", [said.reason()]
    ended = re.search(r"^test result: (ok|FAILED)\.", said.out, re.MULTILINE)
    lines = [re.sub(r"^test \S+ \.\.\. ?", "", line) for line in said.out.splitlines()]
    end = next((i for i, line in enumerate(lines) if line in ("ok", "FAILED")), len(lines))
    text = [line for line in lines[:end] if line and not line.startswith("running ")]
    return ("ok" if said.code == 0 and ended and ended[1] == "ok" else "FAILED"), text or [said.reason()] * (said.code != 0)


def parity(run):
    place = run.work / "parity"
    place.mkdir(exist_ok=True)
    (place / "recipe.toml").write_text(RECIPE)
    for model, config, data, lengths in (("model", CONFIG, "train", (201, 170)), ("wide", WIDE, "wide", (448, 384))):
        (place / f"{model}.json").write_text(json.dumps(config))
        rows = [[1 + (i * 7 + row * 31 + i * i % 13) % 500 for i in range(length)] for row, length in enumerate(lengths)]
        (place / f"{data}.jsonl").write_text("".join(json.dumps({"input_ids": ids, "labels": ids}) + "\n" for ids in rows))
        made = run.kvtune(f"parity-{model}", ["init-model", "--config", place / f"{model}.json", "--out", place / model], 60)
        if made.code != 0:
            raise ValueError(made.reason())

    def verify(name, more, device=None):
        return run.kvtune(name, ["verify", "--recipe", place / "recipe.toml", *more], 120, device)

    said = verify("verify", [])
    seen = said.out.strip().splitlines()[-1] if said.code == 0 and said.out.strip() else said.reason()
    run.row("verify: gradient beside masked dense autograd, f64", "proved, 1e-12", seen, said.code == 0)

    def dump(name, settings, device=None, follows=None):
        folder = place / name
        more = ["--dump", folder, *(part for setting in settings for part in ("--set", setting))]
        more += ["--replay-log", place / follows / "replay_log.safetensors"] if follows else []
        said = verify(f"dump-{name}", more, device)
        if said.code != 0:
            raise ValueError(f"{name}: {said.reason()}")
        return folder

    cpu = dump("cpu", [], "cpu")
    here = dump("f32", [], None, "cpu")
    measures = (("gradients", relative_error, "worst matrix of the gradient"), ("logits", largest_difference, "logits"))
    for file, measure, what in measures:
        found = tensors(here / f"{file}.safetensors")
        error = worst(measure(found[name], expected) for name, expected in tensors(cpu / f"{file}.safetensors").items())
        run.row(f"f32 beside the CPU's f32: {what}", "≤ 1e-4", f"{error:.1e}", error <= 1e-4)
    of_wide = [f"model.path={place / 'wide'}", f"data.train={place / 'wide.jsonl'}", "kv_cache.cache_length=192", "kv_cache.chunk_size=64"]
    wide = dump("wide-f32", of_wide)
    pairs = (("", dump("bf16", ["model.dtype=bf16"], None, "cpu"), here),
             (", a model with heads of 64", dump("wide-bf16", [*of_wide, "model.dtype=bf16"], None, "wide-f32"), wide))
    for what, in_bf16, in_f32 in pairs:
        near = cosine(tensors(in_bf16 / "gradients.safetensors"), tensors(in_f32 / "gradients.safetensors"))
        run.row(f"bf16 beside f32: cosine of the whole gradient{what}", "≥ 0.999", f"{near:.6f}", near >= 0.999)
    for name, settings, asked in (("deterministic", ["train.deterministic=true"], "the same bits"), ("repeated", [], "")):
        # The CPU's own is a run without it already.
        first = cpu if run.device == "cpu" and not settings else dump(f"{name}-1", settings)
        second = dump(f"{name}-2", settings)
        files = ("gradients.safetensors", "logits.safetensors", "replay_log.safetensors")
        same = all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
        what = f"two runs {'with `train.deterministic`' if settings else 'without it'}: choices, logits, gradients"
        run.row(what, asked, "the same bits" if same else "other bits", same if asked else None)


def tensors(path):
    """F32 tensors of a safetensors file by name."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "F32":
                raise NotRun(f"`{name}` in {path.name} is {entry['dtype']}")
            found[name] = array.array("f", data[8 + length + begin:8 + length + end])
    return found


def norm(numbers):
    return math.sqrt(sum(x * x for x in numbers))


def worst(errors):
    """The largest; NaN, which is within no bound, where there is one."""
    errors = list(errors)
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def differences(found, expected):
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} numbers, expected {len(expected)}")
    return [x - y for x, y in zip(found, expected)]


def relative_error(found, expected):
    return norm(differences(found, expected)) / norm(expected)


def largest_difference(found, expected):
    return worst(abs(difference) for difference in differences(found, expected))


def cosine(found, expected):
    pairs = [(x, y) for name in expected for x, y in zip(found[name], expected[name])]
    return sum(x * y for x, y in pairs) / (norm(x for x, _ in pairs) * norm(y for _, y in pairs))
