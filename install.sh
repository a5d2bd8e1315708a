#!/bin/sh
# Installs Paceline into a virtual environment of its own, and puts the command `paceline` on the path.
#
#   sh install.sh                     # in a checkout: that version
#   curl -LsSf URL/install.sh | sh    # the newest version of the package index
#
# torch is the CPU build unless `nvidia-smi` finds a GPU. With uv on the path, uv installs; otherwise pip does.
# A second run installs a version next to the first, switches to it when it is complete, and keeps the one before.
#
#   TORCH_INDEX      package index of torch, whatever the machine has
#   TORCH_CPU_INDEX  package index for machines without a GPU: https://download.pytorch.org/whl/cpu
#   TORCH_VERSION    version of torch; default: the tested one in a checkout, otherwise the newest
#   PACELINE_HOME    folder of the versions: ~/.local/share/paceline
#   PACELINE_BIN     folder of the command: ~/.local/bin
#   PACELINE_EXTRAS  extras: all
#   PYTHON           Python 3.11 or later
set -eu

home=${PACELINE_HOME:-$HOME/.local/share/paceline}
bin=${PACELINE_BIN:-$HOME/.local/bin}
extras=${PACELINE_EXTRAS:-all}
index=${TORCH_INDEX:-}
torch=${TORCH_VERSION:-}
new=$home/$(date +%Y%m%d-%H%M%S)-$$
work=$(mktemp -d)

fail() {
    echo "error: $*" >&2
    exit 1
}

# A run that fails or is interrupted leaves the installed version as it was.
clean_up() {
    status=$?
    rm -rf "$work"
    [ "$status" = 0 ] || rm -rf "$new"
}

# Packages with uv or pip, in the new environment.
add() {
    if command -v uv >/dev/null; then
        uv pip install --python "$new/bin/python" -c "$work/constraints.txt" "$@"
    else
        "$new/bin/python" -m pip install --disable-pip-version-check --quiet --progress-bar "$bar" -c "$work/constraints.txt" "$@"
    fi
}

add_torch() {
    option=--index-url
    ! command -v uv >/dev/null || option=--default-index
    add "torch${torch:+==$torch}" ${index:+"$option" "$index"}
}

make_environment() {
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if command -v uv >/dev/null; then
        uv venv --quiet --python "${python:->=3.11}" "$new"
    elif [ -n "$python" ]; then
        "$python" -m venv "$new" || fail "this Python makes no virtual environments: install python3-venv, or uv"
    else
        fail "Python 3.11 or later is needed: install it, or name it by PYTHON=…, or install uv, which brings its own"
    fi
}

choose_torch() {
    if [ -n "$index" ]; then
        echo "torch comes from $index."
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo "There is an NVIDIA GPU: torch is the build for CUDA, which is several gigabytes."
    elif [ "$(uname -s)" = Linux ]; then
        index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
        echo "There is no NVIDIA GPU: torch is the CPU build of $index. TORCH_INDEX=URL chooses another one."
    fi
}

# A copy is built, so that the checkout stays as it is.
add_from_checkout() {
    if [ -n "$torch" ]; then # each version of torch has its own version of Triton
        sed -e '/^torch==/d' -e '/^triton==/d' "$checkout/constraints.txt" >"$work/constraints.txt"
    else
        cp "$checkout/constraints.txt" "$work/constraints.txt"
    fi
    add_torch
    for name in src packages pyproject.toml README.md LICENSE; do cp -R "$checkout/$name" "$work"; done
    add "paceline[$extras] @ file://$work"
    add --no-deps --target "$work/model" "$(sed -n 's/^MODEL *:= *//p' "$checkout/Makefile")"
    PYTHONPATH=$work/src:$work/model "$new/bin/python" "$work/packages/smollm2/stage.py" "$work/smollm2"
    add --no-deps "$work/smollm2"
}

add_from_index() {
    : >"$work/constraints.txt"
    add_torch
    add "paceline[$extras,smollm2]"
}

switch() {
    version=$("$new/bin/paceline" --version)
    previous=$(readlink "$home/current" || true)
    mkdir -p "$bin"
    ln -sfn "$new" "$home/current"
    ln -sfn "$home/current/bin/paceline" "$bin/paceline"
    for folder in "$home"/2*-*; do
        if [ "$folder" != "$new" ] && [ "$folder" != "$previous" ]; then rm -rf "$folder"; fi
    done
    echo "$version is installed in $new."
    [ -z "$previous" ] || echo "The version before stays. To go back: ln -sfn $previous $home/current"
    case :$PATH: in
        *:"$bin":*) echo "Next: paceline serve" ;;
        *) echo "Next: export PATH=\"$bin:\$PATH\" && paceline serve" ;;
    esac
}

# A function, so that a shell that reads from a pipe has read all of it before the first command.
main() {
    trap clean_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    bar=off
    [ ! -t 2 ] || bar=on
    checkout=$(cd "$(dirname "$0")" && pwd)
    choose_torch
    make_environment
    if [ "${0##*/}" = install.sh ] && grep -q '^name = "paceline"' "$checkout/pyproject.toml" 2>/dev/null; then
        add_from_checkout
    else
        add_from_index
    fi
    if ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
        add ziglang # compiles the CPU kernels when a server first starts
    fi
    switch
}

main </dev/null
