#!/bin/sh
# Makes sure that a libtorch is where cargo looks for it: third_party/torch (see .cargo/config.toml), or $LIBTORCH.
#
# In this order: $LIBTORCH as it is; the torch of the active python3; what an earlier run installed; a fresh install of the
# CPU part of the torch wheel. third_party/torch is only a link, so switching between them costs nothing.
# For CUDA the full set of wheels is needed: activate a Python environment that has them, or set LIBTORCH to its torch folder.
#
# Of the full set one more wheel is installed, CUDA's run-time compiler: it needs no GPU, and tests compile the kernels with it.
set -eu

VERSION=2.11.0
WHEELS="torch==$VERSION nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85"
COMPILER="nvidia-cuda-nvrtc==13.0.88"

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
third_party=$root/third_party
link=$third_party/torch
wheels=$third_party/wheels
partial=$third_party/wheels.partial

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# The version a libtorch folder's headers name, as 2.11; nothing where there is no usable libtorch.
version_of() {
    [ -f "$1/lib/libtorch_cpu.so" ] || return 0
    for header in include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h; do
        [ -f "$1/$header" ] || continue
        sed -n 's/^#define TORCH_VERSION_M[AI][JN]OR \([0-9][0-9]*\).*/\1/p' "$1/$header" | paste -s -d . -
        return 0
    done
}

usable() { [ "$(version_of "$1")" = "${VERSION%.*}" ]; }

# The folder of the active Python's torch, found without importing it.
python_torch() {
    command -v python3 >/dev/null 2>&1 || return 0
    python3 -c '
import importlib.util
spec = importlib.util.find_spec("torch")
print(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else "")' 2>/dev/null || true
}

point_to() {
    if [ "$(readlink "$link" 2>/dev/null || true)" != "$1" ]; then
        rm -f "$link.new"
        ln -s "$1" "$link.new"
        # Renaming is atomic: a build that runs meanwhile sees the old link or the new one.
        mv -T "$link.new" "$link"
    fi
}

# `pip_install FOLDER WHEEL...`
pip_install() {
    target=$1
    shift
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --only-binary=:all: \
        --target "$target" "$@"
}

install_wheels() {
    command -v python3 >/dev/null 2>&1 ||
        die "libtorch $VERSION is installed from its Python wheel, and there is no python3: install python3 and pip, or set LIBTORCH"
    python3 -m pip --version >/dev/null 2>&1 ||
        die "libtorch $VERSION is installed from its Python wheel, and python3 has no pip: install it (on Debian: apt install python3-pip), or set LIBTORCH"
    say "installing the CPU part of libtorch $VERSION into third_party (540 MB to download, 0.6 GB on disk)"
    rm -rf "$partial" "$wheels"
    mkdir -p "$partial"
    # shellcheck disable=SC2086  # one word per wheel
    pip_install "$partial" $WHEELS ||
        die "pip could not install $WHEELS (see above); to use a libtorch of your own, set LIBTORCH"
    trim "$partial"
    usable "$partial/torch" || die "the torch wheel for this machine holds no libtorch ${VERSION%.*}"
    # Only a complete install ever has this name, so the name is its stamp.
    mv -T "$partial" "$wheels"
}

# Completes what is installed with CUDA's run-time compiler: its two libraries, also where an earlier setup has left them out. Without
# them everything builds and passes but the kernels' compilation, which is skipped; so a failure is told, and no error.
add_compiler() {
    libraries=$wheels/nvidia/cu13/lib
    [ ! -e "$libraries/libnvrtc.so.13" ] || return 0
    say "installing CUDA's run-time compiler beside it (90 MB to download)"
    rm -rf "$partial"
    mkdir -p "$partial"
    if pip_install "$partial" --retries 1 "$COMPILER" && mkdir -p "$libraries"; then
        mv -f "$partial/nvidia/cu13/lib/libnvrtc-builtins.so.13.0" "$libraries" &&
            # Last, and by a rename: where it is, nothing is missing.
            mv -f "$partial/nvidia/cu13/lib/libnvrtc.so.13" "$libraries" || rm -f "$libraries/libnvrtc.so.13"
        mv -n "$partial"/nvidia_cuda_nvrtc-*.dist-info "$wheels" || true
    fi
    rm -rf "$partial"
    [ -e "$libraries/libnvrtc.so.13" ] || say "without $COMPILER: pip could not install it (see above); tests of CUDA kernels will skip their compilation"
}

# Keeps libraries, headers and licences. libtorch's CUDA half cannot load without wheels that are not installed here.
trim() {
    rm -rf "${1:?}/bin" "$1/functorch" "$1/torchgen" "$1"/nvidia/*/include
    for entry in "$1"/torch/* "$1"/torch/.[!.]*; do
        case ${entry##*/} in
            lib | include) ;;
            *) rm -rf "$entry" ;;
        esac
    done
    rm -rf "$1"/torch/lib/libtorch_cuda*.so "$1"/torch/lib/libtorch_python.so "$1"/torch/lib/libtorch_nvshmem.so \
        "$1"/torch/lib/libcaffe2_nvrtc.so "$1"/torch/lib/libc10_cuda.so "$1"/torch/lib/libshm*
}

command -v "${CXX:-c++}" >/dev/null 2>&1 || die "there is no C++ compiler: install one (on Debian: apt install g++)"

if [ -n "${LIBTORCH:-}" ]; then
    found=$(version_of "$LIBTORCH")
    [ "$found" = "${VERSION%.*}" ] ||
        die "LIBTORCH is \`$LIBTORCH\`: expected a folder with lib/libtorch_cpu.so and headers of ${VERSION%.*}, found ${found:-none}; unset it to have one installed"
    say "using LIBTORCH, $LIBTORCH (keep it set when you call cargo yourself)"
    exit 0
fi

mkdir -p "$third_party"
# Two setups at once would delete each other's half of an install.
if command -v flock >/dev/null 2>&1; then
    exec 9>"$third_party/.lock"
    flock 9
fi

if [ -d "$link" ] && [ ! -L "$link" ]; then
    usable "$link" || die "third_party/torch is a folder, but no libtorch ${VERSION%.*}: remove it and try again"
    say "using third_party/torch"
    exit 0
fi

from_python=$(python_torch)
if [ -n "$from_python" ] && usable "$from_python"; then
    point_to "$from_python"
    say "using the active Python's libtorch, $from_python"
elif usable "$link" && [ "$(readlink "$link")" != wheels/torch ]; then
    say "using third_party/torch -> $(readlink "$link")"
else
    usable "$wheels/torch" || install_wheels
    add_compiler
    point_to wheels/torch
    say "using third_party/torch -> wheels/torch"
fi
