#!/bin/sh
# What needs a GPU, on a machine with torch 2.11.0+cu130 in its Python and nothing else installed, as one table and one archive:
#
#   tests/device/run.sh [BINARY [TESTS]] [--only a,b,c,d] [--minutes M] [--out DIR] [--device cuda:0]
#
# BINARY is `kvtune` and TESTS the program of the device tests; without them both are taken from beside this script, where
# `make device-pack` puts them. `--help` tells the rest.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
export PYTHONDONTWRITEBYTECODE=1
exec "${PYTHON:-python3}" "$here/run.py" "$@"
