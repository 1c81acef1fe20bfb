"""Commands of kvtune as they run, and what a run has trained."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import binary
from .errors import KvtuneError
from .policy_file import GATES, NAME, PolicyFile, checkpoint
from .versions import require_transformers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Run:
    """A command under way. It yields what the command prints as JSON while it runs: of a training each line of `metrics.jsonl` as it is
    written, and at last how it went."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self._messages = tempfile.NamedTemporaryFile(prefix="kvtune-", suffix=".log")
        command = [str(binary.path()), *arguments, "--format", "json"]
        # In a session of its own, so that one Ctrl-C is one signal: a second would end a training without saving.
        self.process = subprocess.Popen(
            command, env=binary.environment(), stdout=subprocess.PIPE, stderr=self._messages, text=True, start_new_session=True
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                yield json.loads(line)
        except KeyboardInterrupt:
            self.stop()
            raise
        if code := self.process.wait():
            told = self.messages.strip().splitlines()[-8:]
            what = "\n".join([f"`kvtune {' '.join(self.arguments)}` ended with exit code {code}:", *told])
            raise KvtuneError(what, "docs/reference/commands.md says what the code means")

    @property
    def messages(self) -> str:
        """What the command has told beside its results: warnings and notes."""
        return Path(self._messages.name).read_text()

    def stop(self) -> int:
        """Ends the command as Ctrl-C does: a training saves after its step. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.communicate()
        return self.process.returncode

    def wait(self) -> dict[str, Any]:
        """Waits for the end; the last of what the command has printed."""
        last: dict[str, Any] = {}
        for last in self:
            pass
        return last


def run(command: str, *arguments: str | Path, out: str | Path | None = None, set: dict[str, Any] | None = None) -> Run:
    """Starts a command of kvtune, as `run("train", "my.toml", out="runs/my", set={"train.max_steps": 10})`. `set` changes keys of the
    recipe."""
    words = [command, *map(str, arguments)]
    words += [] if out is None else ["--out", str(out)]
    for key, value in (set or {}).items():
        words += ["--set", f"{key}={_toml(value)}"]
    return Run(words)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (bool, int, float)):
        return str(value).lower()
    raise KvtuneError(f"`set` has the value {value!r}", "give texts, numbers, booleans, lists and dictionaries of them")


def load(run: str | Path, **options: Any) -> tuple[PeftModel | PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model of a run, a checkpoint or an export, and its tokenizer, if it has one: of an adapter a `PeftModel` over its base, ready to
    generate, in the dtype of the training. `options` are those of `AutoModelForCausalLM.from_pretrained`."""
    require_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = checkpoint(run)
    adapter = path / "adapter_config.json"
    base = str(path)
    if adapter.exists():
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
    elif not (path / "config.json").exists():
        raise KvtuneError(f"`{path}` holds neither an adapter nor a model", "give a run, a checkpoint or an export of kvtune")
    if base.endswith(".gguf"):
        what = f"the base of `{path}` is the GGUF file `{base}`, which PEFT cannot load"
        raise KvtuneError(what, "load the model that `kvtune export --for merged` writes, or use `kvtune serve`")
    dtype = "auto"
    if (path / NAME).exists():
        dtype = {"f32": "float32", "bf16": "bfloat16", "f64": "float64"}[PolicyFile.read(path).conformance["dtype"]]
    model: Any = AutoModelForCausalLM.from_pretrained(base, **{"dtype": dtype, **options})
    if adapter.exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(path))
    if (path / GATES).exists():
        from .cache import show_gates

        show_gates(model)
    place = next((place for place in (path, Path(base)) if (place / "tokenizer.json").exists()), None)
    # The base may be a name on the Hub.
    tokenizer = AutoTokenizer.from_pretrained(place or base) if place or not Path(base).is_dir() else None
    return model.eval(), tokenizer
