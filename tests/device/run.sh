#!/bin/sh
# Everything that needs a GPU, on a machine with torch 2.11.0+cu130 in its Python and nothing else installed, as one table:
#
#   tests/device/run.sh BINARY [TESTS] [--quick] [--only NAME]… [--minutes M] [--out DIR] [--device cuda:0]
#
# BINARY is `kvtune`; TESTS the device tests' binary, `target/release/deps/device-…`, where it is at hand. `--help` tells the rest.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
exec "${PYTHON:-python3}" "$here/run.py" "$@"
