#!/usr/bin/env bash
# Builds the cpu target of docker/Dockerfile and runs it, without a registry and without a container daemon: the base is a
# Debian 12 root file system of mmdebstrap. Then, as the image's user: `vime doctor`, a /dev/shm that is too small, the GPU
# check on a machine without a GPU, and the tiny demo for two rollouts. A person or a release runs this; CI does not.
#
#   bash scripts/build-cpu-image.sh              as root, on Debian: apt-get install mmdebstrap buildah
#   PARTS="base image" bash scripts/build-cpu-image.sh    some of: base image check demo clean
#
#   WORK             folder of images and containers (default vime-image in TMPDIR); needs 25 GB; `clean` removes it
#   SUITE            Debian release of the base (default bookworm)
#   PIP_CONFIG_FILE  pip's settings for the build, such as an index with CPU builds of PyTorch; the image does not keep it
#   BUILD_OPTIONS    more options of `buildah build`, such as "--volume HOST:CONTAINER:ro" for files that pip's settings name
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
WORK=${WORK:-${TMPDIR:-/tmp}/vime-image}
PARTS=${PARTS:-base image check demo clean}
IMAGE=vime:cpu

die() { echo "build-cpu-image: $*" >&2; exit 1; }
step() { echo "build-cpu-image: [$SECONDS s] $*"; }
wants() { [[ " $PARTS " == *" $1 "* ]]; }
((EUID == 0)) || die "the user must be root, got user $EUID; a root file system and a chroot need it"
for tool in mmdebstrap buildah; do
    command -v "$tool" >/dev/null || die "$tool must be installed; Debian: apt-get install mmdebstrap buildah"
done
mkdir -p "$WORK"
free_mib=$(df -Pm "$WORK" | awk 'NR == 2 { print $4 }')
((free_mib >= 25000)) || die "WORK must be where 25000 MiB are free, got $WORK, where $free_mib are; set another WORK"

# vfs and chroot need neither a kernel module nor a user namespace, so that this runs inside a container, too.
build() { buildah --storage-driver vfs --root "$WORK/storage" --runroot "$WORK/run" "$@"; }

if wants base; then
    mmdebstrap --quiet --variant=minbase --include=ca-certificates "${SUITE:-bookworm}" "$WORK/base.tar"
    container=$(build from scratch)
    build add --quiet "$container" "$WORK/base.tar" / >/dev/null
    build commit --quiet --rm "$container" vime-base >/dev/null
    step "base image: $(stat --format=%s "$WORK/base.tar" | numfmt --to=iec)"
    rm "$WORK/base.tar"
fi
if wants image; then
    read -ra options <<<"${BUILD_OPTIONS:-}"
    [[ -z "${PIP_CONFIG_FILE:-}" ]] || options+=(--secret "id=pip.conf,src=$PIP_CONFIG_FILE")
    # The docker format, since OCI's has no health check.
    build bud --isolation chroot --format docker --target cpu --build-arg CPU_BASE=localhost/vime-base \
        --build-arg REVISION="$(git rev-parse HEAD)" "${options[@]}" --tag "$IMAGE" --file docker/Dockerfile . \
        >"$WORK/build.log" 2>&1 || { tail -n 40 "$WORK/build.log" >&2; die "the build failed; all of it: $WORK/build.log"; }
    size=$(build images --format '{{.Size}}' "$IMAGE")
    step "image: $size"
fi

# COMMAND in a new container of the image, as its user, with a /dev/shm of that size.
inside() { # SHM_SIZE COMMAND...
    local shm=$1 container status=0
    shift
    container=$(build from "$IMAGE")
    build run --isolation chroot --mount "type=tmpfs,destination=/dev/shm,tmpfs-size=$shm,tmpfs-mode=1777" \
        "$container" -- "$@" || status=$?
    build rm "$container" >/dev/null
    return "$status"
}
if wants check; then
    step "user: $(inside 2g id)"
    inside 2g bash -c 'touch /srv/vime/code 2>/dev/null' && die "the image's code must be read-only for its user"
    inside 2g bash scripts/setup.sh | { ! grep .; } || die "scripts/setup.sh must find the image complete"
    step "setup.sh installs nothing; the health check:"
    read -ra check < <(build inspect --type image --format '{{join (slice .Docker.Config.Healthcheck.Test 1) " "}}' "$IMAGE")
    inside 2g "${check[@]}"
fi
