#!/bin/sh
# Stands in for rustdoc where `cargo test --doc` would have it run examples: it documents the library, warnings being errors, with the crates that
# the tests are built with. `cargo doc` would compile all of them once more.
set -eu
skip=0
for argument; do
    shift
    case $argument in
    --test) ;;
    --test-run-directory | --test-args) skip=1 ;;
    *) if [ $skip = 1 ]; then skip=0; else set -- "$@" "$argument"; fi ;;
    esac
done
exec rustdoc "$@" -D warnings --out-dir "${CARGO_TARGET_DIR:-target}/doc"
