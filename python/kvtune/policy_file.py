"""`kv_policy.json`: through which cache a model was trained. docs/reference/kv-policy.md describes the file."""

from __future__ import annotations

import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import KvtuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "kv_policy.json"
GATES = "kv_gates.safetensors"
# Rotations that depend on the length of the whole sequence, which Transformers does not know in advance.
BY_LENGTH = ("dynamic", "dynamic_yarn", "long_rope")


@dataclass(frozen=True)
class PolicyFile:
    path: Path
    policy: str | dict[str, Any]
    heads: tuple[int, ...]
    """KV heads by layer."""
    cache_lengths: tuple[int, ...]
    windows: tuple[int | None, ...]
    sinks: tuple[int, ...]
    grace: tuple[int, ...]
    chunk_size: int
    decode_block: int
    chunking: str
    buffer: str
    conformance: dict[str, Any]

    @classmethod
    def read(cls, run: str | Path) -> PolicyFile:
        """Reads the file of a run, a checkpoint or an export, or a file itself."""
        path = Path(run) if Path(run).is_file() else checkpoint(run) / NAME
        if not path.is_file():
            raise KvtuneError(f"`{path}` does not exist", "give a run, a checkpoint or an export of kvtune")
        content = json.loads(path.read_text())

        def expect(key: str, *allowed: object) -> None:
            if content.get(key) not in allowed:
                found = json.dumps(content.get(key))
                raise KvtuneError(f"`{key}` in `{path}` is {found}, expected {json.dumps(allowed[0])}", "install the version of kvtune that wrote it")

        expect("format", "kvtune kv policy")
        expect("version", 1)
        expect("prefill", "until the smallest cache is full")
        expect("positions", "absolute")
        expect("chunking", "plain", "reference")
        expect("buffer", "plain", "int8", "int4")
        kinds = {((rope or {}).get("scaling") or {}).get("kind") for rope in content["rope"]}
        if by_length := kinds & set(BY_LENGTH):
            what = f"`rope` in `{path}` has the scaling `{by_length.pop()}`, which depends on the length of the whole sequence"
            raise KvtuneError(what, "use `kvtune generate` or `kvtune serve`: Transformers rotates by the length so far")
        # The configuration of a merged model has the scaling; the base of an adapter does not.
        if content["rope_scaling"] is not None and not (path.parent / "config.json").exists():
            what = f"`{path}` has a `rope_scaling` that the base model does not have"
            raise KvtuneError(what, "load the model that `kvtune export --for merged` writes")
        if any(length != lengths[0] for lengths in content["cache_lengths"] for length in lengths):
            raise KvtuneError(f"`cache_lengths` in `{path}` differ within a layer", "take the file from its checkpoint again")
        return cls(
            path=path,
            policy=content["policy"],
            heads=tuple(map(len, content["cache_lengths"])),
            cache_lengths=tuple(lengths[0] for lengths in content["cache_lengths"]),
            windows=tuple(content["windows"]),
            sinks=tuple(content["sinks"]),
            grace=tuple(content["grace"]),
            chunk_size=content["chunk_size"],
            decode_block=content.get("decode_block", 1),
            chunking=content["chunking"],
            buffer=content["buffer"],
            conformance=content["conformance"],
        )

    def trial(self) -> PolicyFile:
        """The smaller cache that the conformance test was recorded with."""
        slots = self.conformance["cache_length"]
        own = zip(self.cache_lengths, self.windows)
        lengths = tuple(length if window else min(length, slots) for length, window in own)
        return replace(self, cache_lengths=lengths, chunk_size=self.conformance["chunk_size"], sinks=(), grace=())

    def full_at(self) -> list[int]:
        """At how many tokens caches become full, ascending."""
        return sorted({length for length, window in zip(self.cache_lengths, self.windows) if window is None})


def checkpoint(run: str | Path) -> Path:
    """The best known end of a run: `final`, else its newest checkpoint; or the directory itself."""
    run = Path(run)
    if (run / "final").is_dir():
        return run / "final"
    latest = run / "latest"
    return run / latest.read_text().strip() if latest.is_file() else run


def initial_part(run: str | Path, tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> tuple[int, int]:
    """Where the initial part of a prompt begins and ends that the policy `smart-lastrec` of a run keeps."""
    policy = PolicyFile.read(run).policy
    params = policy.get("smart-lastrec") if isinstance(policy, dict) else None
    if params is None:
        raise KvtuneError(f"the policy of `{run}` keeps no initial part", "leave `initial_part` out")
    ids = list(input_ids)
    pads = next((at for at, token in enumerate(ids) if token != params.get("pad_id", 0)), len(ids))
    begin, rest = 0 if params.get("range_is_prefix", True) else pads, ids[pads:]
    if not rest:
        return 0, len(ids)

    def text(count: int) -> str:
        return str(tokenizer.decode(rest[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False))

    pattern = params["end_initial_regex"]
    try:
        with warnings.catch_warnings():
            # Python warns of classes in classes and of operations on them, which the program knows and Python does not.
            warnings.simplefilter("error", FutureWarning)
            expression = re.compile(pattern)
    except (re.error, FutureWarning) as error:
        what = f"Python does not read the regular expression `{pattern}` of `{run}` as the program does: {error}"
        raise KvtuneError(what, "give `from_run` the positions yourself, or train with an expression that both read alike") from error
    found = expression.search(text(len(rest)))
    if found is None:
        return begin, len(ids)
    end = found.end() if params.get("include_end_string", True) else found.start()
    # Half a character decodes to U+FFFD, and must not count.
    count = bisect_left(range(len(rest)), end, key=lambda count: len(text(count).rstrip("\ufffd")))
    return begin, pads + count
