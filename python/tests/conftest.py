"""Runs of the tiny models of `tests/fixtures`, made by the binary that `KVTUNE` names, or the wheel's own."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvtune import binary

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


def ids(count: int, seed: int = 0, vocab: int = 500) -> list[int]:
    return [random.Random(seed).randrange(3, vocab) for _ in range(1)] + [random.Random(seed + i).randrange(3, vocab) for i in range(1, count)]


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """Trains two steps with a model and a `[kv_cache]`; the run's directory, the same for the same words."""
    made: dict[tuple[str, ...], Path] = {}

    def make(model: str, cache: str, dtype: str = "f32") -> Path:
        key = (model, cache, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            rows = [json.dumps({"input_ids": ids(150, 1000 * row), "labels": ids(150, 1000 * row)}) for row in range(4)]
            (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
            (folder / "recipe.toml").write_text(
                f'[model]\npath = "{model_dir(model)}"\ndtype = "{dtype}"\n[lora]\nr = 4\n[data]\nformat = "tokens"\ntrain = "train.jsonl"\n'
                f"[train]\nmax_steps = 2\nseed = 1\n[optimizer]\nlearning_rate = 0.02\n[kv_cache]\n{cache}\n"
            )
            kvtune("train", folder / "recipe.toml", "--out", folder / "run", "-q", "--threads", 1)
            made[key] = folder / "run"
        return made[key]

    return make


@pytest.fixture(scope="session")
def load():
    """The merged model of a run."""
    from peft import PeftModel

    def load(run: Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa"):
        final = run / "final"
        base = json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"]
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation=attention)
        return PeftModel.from_pretrained(model, str(final)).merge_and_unload().eval()

    return load
