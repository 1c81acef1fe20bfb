"""Runs of the tiny models of `tests/fixtures`, made by the binary that `KVTUNE` names, or the wheel's own."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvtune import KvPolicyCache, binary
from kvtune.cache import ARGUMENT, show_gates

FIXTURES = Path(__file__).parents[2] / "tests/fixtures"
logging.disable_progress_bar()
torch.set_num_threads(1)


def model_dir(name: str) -> Path:
    return FIXTURES / name if name == "model-qwen2" else FIXTURES / "families" / name


def kvtune(*arguments: object) -> str:
    """What a command prints."""
    done = subprocess.run([binary.path(), *map(str, arguments)], env=binary.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ids(count: int, seed: int = 0) -> list[int]:
    """Tokens without meaning, none of them twice."""
    return random.Random(seed).sample(range(3, 512), count)


def write(model, tokens: torch.Tensor, cache: KvPolicyCache, new: int, **options) -> torch.Tensor:
    """Goes on from tokens by the likeliest ones."""
    options = {"do_sample": False, "pad_token_id": 0, ARGUMENT: cache, **options}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, **options)


def write_gates(path: Path, config: dict, kind: str) -> None:
    """Gates that have learned nothing: `gates` are linear, `gates-deep` have a hidden layer, `gates-attention` are Fast KVzip's."""
    torch.manual_seed(0)
    (width, heads), gates = (config["hidden_size"], config["num_key_value_heads"]), {}
    d, queries, sinks = 4, 2, 3
    pair = lambda part, out, inner: {f"{part}weight": (out, inner), f"{part}bias": (out,)}
    sizes = {
        "gates": pair("", heads, width),
        "gates-deep": pair("0.", 8, width) | pair("2.", heads, 8),
        "gates-attention": pair("q_proj.", heads * queries * d, width)
        | {"k_proj.weight": (heads * d, width), "q_norm.weight": (d,), "k_norm.weight": (d,)}
        | {"k_base": (heads, 1, sinks, d), "b": (heads, 1, queries)},
    }[kind]
    heads, d = config["num_attention_heads"], config.get("head_dim") or width // config["num_attention_heads"]
    sizes |= {"query_mean": (heads, d), "query_length_excess": (heads, d // 2)}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            gates[f"module_list.{layer}.{name}"] = torch.randn(size) / (size[-1] ** 0.5 if len(size) == 2 else 1)
    save_file(gates, path)


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """Trains two steps with a model and a `[kv_cache]`; the run's directory, the same for the same words."""
    made: dict[tuple[str, ...], Path] = {}

    def make(model: str, cache: str, dtype: str = "f32") -> Path:
        key = (model, cache, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            rows = [json.dumps({"input_ids": ids(150, row), "labels": ids(150, row)}) for row in range(4)]
            (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
            (folder / "recipe.toml").write_text(
                f'[model]\npath = "{model_dir(model)}"\ndtype = "{dtype}"\n[lora]\nr = 4\n[data]\nformat = "tokens"\ntrain = "train.jsonl"\n'
                f"[train]\nmax_steps = 2\nseed = 1\n[optimizer]\nlearning_rate = 0.02\n[kv_cache]\n{cache}\n"
            )
            for name in re.findall('gates = "(.*)"', cache):
                (folder / name).mkdir()
                write_gates(folder / name / "kv_gates.safetensors", json.loads((model_dir(model) / "config.json").read_text()), name)
            kvtune("train", folder / "recipe.toml", "--out", folder / "run", "-q", "--threads", 1)
            made[key] = folder / "run"
        return made[key]

    return make


@pytest.fixture(scope="session")
def load():
    """The model of a run, with its adapter merged or beside it."""
    from peft import PeftModel

    def load(run: Path, dtype: str = "f32", attention: str = "sdpa", is_merged: bool = True):
        final = run / "final"
        base = json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"]
        model = AutoModelForCausalLM.from_pretrained(base, dtype={"f32": torch.float32, "f64": torch.float64}[dtype], attn_implementation=attention)
        model.generation_config.eos_token_id = None
        show_gates(model)
        adapted = PeftModel.from_pretrained(model, str(final))
        return (adapted.merge_and_unload() if is_merged else adapted).eval()

    return load
