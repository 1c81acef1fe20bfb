#!/usr/bin/env python3
"""Packs the built program and this package into a wheel: `python3 python/wheel.py target/release/kvtune target/wheels`.

No build backend is needed, as nothing is compiled here. The program finds libtorch in the `torch` that the wheel requires: beside the package,
whatever the version of Python.
"""

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
# From `kvtune/bin` in `site-packages`.
RUN_PATH = b"$ORIGIN/../../torch/lib"
COMPLETIONS = {
    "bash": "share/bash-completion/completions/kvtune",
    "fish": "share/fish/vendor_completions.d/kvtune.fish",
    "zsh": "share/zsh/site-functions/_kvtune",
}
LARGEST = 25_000_000
METADATA = """\
Metadata-Version: 2.4
Name: kvtune
Version: {version}
Summary: {summary}
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: torch==2.11.*
Provides-Extra: transformers
Requires-Dist: transformers>=5.3,<6; extra == "transformers"
Requires-Dist: peft>=0.21; extra == "transformers"
Description-Content-Type: text/markdown

The program `kvtune` and its Python package: `kvtune --help` lists the commands, and `kvtune.KvPolicyCache` runs a trained model through its
cache in Transformers (`pip install kvtune[transformers]`).
"""


def portable(program: bytes) -> bytes:
    """The program with the run path of the wheel in place of that of the build, which names folders of this machine."""
    found = re.findall(rb"(?<=\0)\$ORIGIN/[^\0]*torch/lib[^\0]*(?=\0)", program)
    if program[:4] != b"\x7fELF" or len(found) != 1 or len(found[0]) < len(RUN_PATH):
        raise SystemExit("wheel: error: the program has no run path of libtorch\nhint: build it with `make build`")
    return program.replace(b"\0" + found[0] + b"\0", b"\0" + RUN_PATH.ljust(len(found[0]), b"\0") + b"\0")


def tag(program: bytes) -> str:
    """The oldest manylinux that has all that the program needs of glibc."""
    needed = max(int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?(?=\0)", program))
    return f"py3-none-manylinux_2_{needed}_x86_64"


def main() -> None:
    binary, out = Path(sys.argv[1]), Path(sys.argv[2])
    cargo = (HERE.parent / "Cargo.toml").read_text()
    version, summary = (re.search(rf'^{key} = "(.*)"$', cargo, re.M)[1] for key in ("version", "description"))
    program = portable(binary.read_bytes())
    name, info = f"kvtune-{version}", f"kvtune-{version}.dist-info"
    files = {f"kvtune/{path.name}": path.read_bytes() for path in sorted((HERE / "kvtune").iterdir()) if path.is_file()}
    files["kvtune/bin/kvtune"] = program
    for shell, place in COMPLETIONS.items():
        script = subprocess.run([binary, "completions", shell], check=True, capture_output=True).stdout
        files[f"{name}.data/data/{place}"] = script
    files[f"{info}/METADATA"] = METADATA.format(version=version, summary=summary).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: kvtune\nRoot-Is-Purelib: false\nTag: {tag(program)}\n".encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nkvtune = kvtune.binary:main\n"
    files[f"{info}/licenses/LICENSE"] = (HERE.parent / "LICENSE").read_bytes()
    record = [f"{path},sha256={digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{name}-{tag(program)}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path)  # From 1980, so that the same files make the same wheel.
            entry.external_attr = (0o100755 if path == "kvtune/bin/kvtune" else 0o100644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    size = wheel.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"wheel: error: {wheel} has {size / 1e6:.1f} MB, expected at most {LARGEST / 1e6:.0f}\nhint: is the program stripped?")
    print(f"{wheel}: {size / 1e6:.1f} MB")


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main()
