#!/usr/bin/env bash
# Builds a target of docker/Dockerfile and runs it, without a registry and without a container daemon. The base is a Debian
# root file system of mmdebstrap. As the image's user, it then runs the checks of docker/README.md and, in the cpu image,
# two rollouts of the tiny demo. Run it before a release; CI does not run it.
#
#   bash scripts/build-image.sh cpu           as root, on Debian: apt-get install mmdebstrap buildah
#   BASE_PYTHON=/usr/local bash scripts/build-image.sh gpu
#   PARTS="base image" bash scripts/build-image.sh cpu    some of: base image check demo clean
#
#   WORK             folder of images and containers (default vime-image in TMPDIR); `clean` removes it
#   SUITE            Debian release of the base (default bookworm for cpu, trixie for gpu)
#   BASE_PYTHON      folder of a CPython to copy to the base's /usr/local, where SUITE lacks the Python of the lock file
#   STORAGE_DRIVER   of buildah (default vfs, which works everywhere; overlay stores a layer once)
#   PIP_CONFIG_FILE  pip's settings for the build, such as an index with CPU builds of PyTorch; the image does not keep it
#   BUILD_OPTIONS    more options of `buildah build`, such as "--volume HOST:CONTAINER:ro" for files that pip's settings name
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
WORK=${WORK:-${TMPDIR:-/tmp}/vime-image}
PARTS=${PARTS:-base image check demo clean}

die() { echo "build-image: $*" >&2; exit 1; }
step() { echo "build-image: [$SECONDS s] $*"; }
wants() { [[ " $PARTS " == *" $1 "* ]]; }
TARGET=${1:-}
case "$TARGET" in
    cpu) SUITE=${SUITE:-bookworm} BASE_ARGUMENT=CPU_BASE NEEDED_MIB=25000 ;;
    gpu) SUITE=${SUITE:-trixie} BASE_ARGUMENT=CUDA_BASE NEEDED_MIB=40000 ;;
    *) die "TARGET must be cpu or gpu, got '$TARGET'; call: bash scripts/build-image.sh cpu" ;;
esac
IMAGE=vime:$TARGET
((EUID == 0)) || die "the user must be root, got user $EUID; a root file system and a chroot need it"
for tool in mmdebstrap buildah unshare; do
    command -v "$tool" >/dev/null || die "$tool must be installed; Debian: apt-get install mmdebstrap buildah util-linux"
done
mkdir -p "$WORK/tmp"
export TMPDIR=$WORK/tmp # buildah writes a layer there before it stores it
free_mib=$(df -Pm "$WORK" | awk 'NR == 2 { print $4 }')
((free_mib >= NEEDED_MIB)) ||
    die "WORK must be where $NEEDED_MIB MiB are free, got $WORK, where $free_mib are; set another WORK"

# vfs and chroot need neither a kernel module nor a user namespace, so this also runs inside a container.
STORAGE=(--storage-driver "${STORAGE_DRIVER:-vfs}" --root "$WORK/storage" --runroot "$WORK/run")
build() { buildah "${STORAGE[@]}" "$@"; }

if wants base; then
    mmdebstrap --quiet --variant=minbase --include=ca-certificates "$SUITE" "$WORK/base.tar"
    container=$(build from scratch)
    build add --quiet "$container" "$WORK/base.tar" / >/dev/null
    if [[ -n "${BASE_PYTHON:-}" ]]; then
        # Packages of pip are left out. /usr/local/bin comes before /usr/bin in PATH, and ldconfig reads /usr/local/lib.
        tar -C "$BASE_PYTHON" --exclude='site-packages/*' --exclude='__pycache__' --exclude='lib/python3*/test' \
            -cf "$WORK/python.tar" bin include lib
        build add --quiet "$container" "$WORK/python.tar" /usr/local/ >/dev/null
        rm "$WORK/python.tar"
        build run --isolation chroot "$container" -- ldconfig
    fi
    build commit --quiet --rm "$container" vime-base >/dev/null
    step "base image: $(stat --format=%s "$WORK/base.tar" | numfmt --to=iec)"
    rm "$WORK/base.tar"
fi
if wants image; then
    read -ra options <<<"${BUILD_OPTIONS:-}"
    [[ -z "${PIP_CONFIG_FILE:-}" ]] || options+=(--secret "id=pip.conf,src=$PIP_CONFIG_FILE")
    # The docker format, because the OCI format has no health check.
    build bud --isolation chroot --format docker --target "$TARGET" --build-arg "$BASE_ARGUMENT=localhost/vime-base" \
        --build-arg REVISION="$(git rev-parse HEAD)" "${options[@]}" --tag "$IMAGE" --file docker/Dockerfile . \
        >"$WORK/build.log" 2>&1 || { tail -n 40 "$WORK/build.log" >&2; die "the build failed; all of it: $WORK/build.log"; }
    size=$(build images --format '{{.Size}}' "$IMAGE")
    step "image: $size"
fi

# Runs COMMAND in the container as the image's user, with a /dev/shm of SHM_SIZE. With chroot isolation, the container has
# its caller's /dev/shm, so the caller runs in its own mount namespace with its own /dev/shm.
inside() { # SHM_SIZE COMMAND...
    # shellcheck disable=SC2016
    unshare --mount bash -euc 'mount -t tmpfs -o "size=$1,mode=1777" shm /dev/shm && exec "${@:2}"' -- "$1" \
        buildah "${STORAGE[@]}" run --isolation chroot "$container" -- "${@:2}"
}
must_fail() { # TEXT SHM_SIZE COMMAND...
    local text=$1 output
    shift
    ! output=$(inside "$@" 2>&1) || die "this must fail: ${*:2}"
    grep -- "$text" <<<"$output" || die "this must name $text: ${*:2}, got: $output"
}
[[ "$TARGET" == cpu ]] || PARTS=${PARTS/demo/} # The demo of the gpu image needs a GPU.
if wants check || wants demo; then
    container=$(build from "$IMAGE")
    trap 'build rm "$container" >/dev/null' EXIT
fi
if wants check; then
    step "the image's user, its read-only code, its complete packages"
    inside 2g id
    must_fail 'Permission denied' 2g touch vime/__init__.py
    inside 2g env PIP_NO_INDEX=1 bash scripts/setup.sh | { ! grep .; } || die "setup.sh must find nothing to do"
    inside 2g vime --help >/dev/null
    # shellcheck disable=SC2016
    mapfile -t health < <(build inspect --type image --format \
        '{{range $i, $word := .Docker.Config.Healthcheck.Test}}{{if $i}}{{println $word}}{{end}}{{end}}' "$IMAGE" | grep .)
    if [[ "$TARGET" == cpu ]]; then
        step "the health check"
        inside 2g "${health[@]}"
        step "the health check where /dev/shm has 64 MiB, docker's default"
        must_fail 'problem .*shared memory' 64m "${health[@]}"
        health=(vime doctor --device cuda)
    else
        step "the packages load without a GPU"
        inside 2g python -W ignore -c 'import megatron.core, ray, torch, triton, vllm
print(*(f"{package.__name__} {package.__version__}" for package in (megatron.core, ray, torch, triton, vllm)), sep=", ")'
        step "the plan of a run for one GPU"
        inside 2g env PLAN=1 NUM_GPUS=1 bash scripts/run-qwen3-4b-grpo.sh >"$WORK/plan.log" 2>&1 ||
            { tail -n 40 "$WORK/plan.log" >&2; die "the plan failed"; }
    fi
    step "a check for GPUs where there are none"
    must_fail 'problem .*gpu' 2g "${health[@]}"
fi
if wants demo; then
    step "the tiny demo, two rollouts"
    inside 4g bash scripts/run-tiny-grpo.sh --num-rollout 2 >"$WORK/demo.log" 2>&1 ||
        { tail -n 40 "$WORK/demo.log" >&2; die "the demo failed; all of it: $WORK/demo.log"; }
    grep -E '^(reward|log-prob difference)' "$WORK/demo.log"
    step "the demo has ended"
fi
if wants clean; then
    [[ -z "${container:-}" ]] || build rm "$container" >/dev/null
    trap - EXIT
    rm -r "$WORK"
fi
step "done"
