"""The program `kvtune`: where it is, and what it needs to find libtorch."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from .errors import KvtuneError

HERE = Path(__file__).parent


def path() -> Path:
    """`$KVTUNE`, the program of the wheel, or the one on `PATH`."""
    places = [Path(place, "kvtune") for place in os.environ.get("PATH", "").split(os.pathsep)]
    named = [Path(os.environ["KVTUNE"])] if "KVTUNE" in os.environ else []
    for place in [*named, HERE / "bin/kvtune", *places]:
        # The script of this package has the same name.
        if place.is_file() and place.open("rb").read(4) == b"\x7fELF":
            return place
    raise KvtuneError("the program `kvtune` is not there", "install the wheel of kvtune, or name the program in the variable `KVTUNE`")


def environment() -> dict[str, str]:
    """The environment of the program, which finds the libtorch of this Python where that is not beside the package."""
    torch = find_spec("torch")
    if torch is None or not torch.origin or (HERE.parent / "torch/lib").exists():
        return dict(os.environ)
    folders = [os.environ.get("LD_LIBRARY_PATH"), str(Path(torch.origin).parent / "lib")]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}


def main() -> None:
    """The command `kvtune`."""
    try:
        program = path()
    except KvtuneError as error:
        raise SystemExit(f"error: {error}") from None
    os.execve(program, ["kvtune", *sys.argv[1:]], environment())
