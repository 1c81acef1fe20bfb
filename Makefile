# The two commands are `make demo` and `make test`; both set up all they need. `make help` lists the rest.

CARGO ?= cargo

# jemalloc cannot be built below a path with blanks: then what is built is kept elsewhere.
ifneq ($(words $(CURDIR)),1)
ifndef CARGO_TARGET_DIR
CACHE := $(or $(XDG_CACHE_HOME),$(if $(HOME),$(HOME)/.cache),$(or $(TMPDIR),/tmp))
export CARGO_TARGET_DIR := $(CACHE)/kvtune-target-$(firstword $(shell pwd | cksum))
endif
endif

# Builds the program of the device tests and prints where it is.
DEVICE_TESTS := $(CARGO) test --release --locked --test device --no-run --message-format=json | \
  sed -n 's/.*"executable":"\([^"]*\/deps\/device-[^"]*\)".*/\1/p'

WHEELS := "$${CARGO_TARGET_DIR:-target}/wheels"

.PHONY: help setup build test faults demo wheel test-wheel test-python device-test device-pack lint clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make setup   find or install libtorch 2.11 (LIBTORCH, the active Python's, or the CPU part of the wheel)
setup:
	@sh .cargo/setup-libtorch.sh

## make build   build the optimised binary, target/release/kvtune
build: setup
	$(CARGO) build --release --locked

## make test    run all tests
# On one thread of libtorch each: the tests are the parallelism, and its threads would spin against each other.
test: setup
	OMP_NUM_THREADS=1 $(CARGO) test --locked

## make faults  kill, damage and starve the binary from outside, and print n/n (docs/CONTRIBUTING.md)
faults: setup
	$(CARGO) build --locked --bin kvtune
	@python3 tests/faults/faults.py $(FAULTS)

## make demo    train, stop, resume, verify and evaluate a real model on real prose (without a network, a small one on this machine's documents)
# The binary of the tests: libtorch does the arithmetic, so an optimised one is hardly faster, and this one is built once.
demo: setup
	$(CARGO) build --locked --bin kvtune --example demo-data
	@sh .cargo/demo.sh

## make wheel   pack the optimised binary and the Python package into a wheel, target/wheels
wheel: build
	@rm -rf $(WHEELS)
	@python3 python/wheel.py "$${CARGO_TARGET_DIR:-target}/release/kvtune" $(WHEELS)

## make test-wheel    install the wheel into a throw-away environment, train a step
test-wheel: wheel
	@python/in_venv.sh wheel $(WHEELS)/*.whl

## make test-python   the same, with Transformers and PEFT, and run the tests of the package
test-python: wheel
	@python/in_venv.sh tests $(WHEELS)/*.whl

## make device-test   what needs a GPU, as one table and one archive (docs/guides/on-a-gpu.md)
device-test: build
	@tests=$$($(DEVICE_TESTS)) && tests/device/run.sh "$${CARGO_TARGET_DIR:-target}/release/kvtune" "$$tests"

## make device-pack   `kvtune` and the device tests, packed beside the script that runs them on another machine
# Release binaries are stripped already (Cargo.toml).
device-pack: build
	@tests=$$($(DEVICE_TESTS)) && test -n "$$tests" && \
	xz -T0 -9 -c "$$tests" >tests/device/device.xz && \
	xz -T0 -9 -c "$${CARGO_TARGET_DIR:-target}/release/kvtune" >tests/device/kvtune.xz && ls -l tests/device/*.xz

# One build serves lints, documentation and, with `make lint test`, the tests: `cargo clippy` and `cargo doc` would compile all crates again.
# What clippy's driver builds lacks the compiler's own checks of raw pointers, which `make test` by itself has.
ifneq ($(filter lint,$(MAKECMDGOALS)),)
export RUSTC_WORKSPACE_WRAPPER := clippy-driver
export CLIPPY_ARGS := -Dwarnings__CLIPPY_HACKERY__
endif

## make lint    formatting, clippy and documentation, warnings being errors
lint: setup
	$(CARGO) fmt --check
	$(CARGO) test --locked --all-targets --no-run
	RUSTDOC="$(CURDIR)/.cargo/document.sh" $(CARGO) test --locked --doc
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny --offline --locked check licenses bans sources; \
	else echo "cargo-deny is not installed: licences, versions and sources of the crates are not checked"; fi

## make clean   remove what was built and the demo's files; libtorch stays in third_party
clean:
	$(CARGO) clean
	rm -rf data/demo
