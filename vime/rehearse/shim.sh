#!/usr/bin/env bash
# Stands in for a program while `vime rehearse` runs a launch script: records the call, and starts no training.
set -euo pipefail
name=${0##*/}
call=$(mktemp "$VIME_REHEARSE/calls/$(date +%s%N)-XXXXXX") || exit 1
printf '%s\0' "$name" "$@" >"$call"
env -0 >"$call.env"
pwd >"$call.cwd"
case $name in
    python | python3)
        for word in "$@"; do
            # an installer, or a training
            case $word in pip | ensurepip | venv | virtualenv | compileall | uv) exit 0 ;; esac
            case $word in train | train.py | train_async.py | */train.py | */train_async.py) exit 0 ;; esac
        done
        "$VIME_REHEARSE_PYTHON" "$@" || { echo "$?" >"$call.failed"; exit 0; }
        ;;
    nvidia-smi)
        fields=
        for word in "$@"; do
            case $word in --query-gpu=*) fields=${word#*=} ;; topo) echo "GPU0 X NV18"; exit 0 ;; esac
        done
        i=0
        while [ "$i" -lt "$VIME_REHEARSE_GPUS" ]; do
            line=
            for field in $(echo "${fields:-name}" | tr ',' ' '); do
                case $field in
                    index) value=$i ;;
                    name) value="NVIDIA H100 80GB HBM3" ;;
                    memory.total) value="81559 MiB" ;;
                    *) value=0 ;;
                esac
                line="$line${line:+, }$value"
            done
            echo "$line"
            i=$((i + 1))
        done
        ;;
    mkdir | rm | cp | mv | ln | touch)
        PATH=${PATH#*"$VIME_REHEARSE/shims/bin:"} # the program itself
        "/bin/$name" "$@" 2>/dev/null || echo "$?" >"$call.failed"
        ;;
esac
exit 0
