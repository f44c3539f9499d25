"""Implements Slurm's commands `srun` and `scontrol` as scripts/slurm/grpo.sh calls them; tasks are local
processes.

Each node is a loopback address. As in Slurm, srun ends the remaining tasks --wait seconds after the first task
ended, and its exit status is the highest status of a task. A node in HANGING_NODES never starts its task.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

NODES = ("node-a", "node-b")


def main(argv: list[str]) -> int:
    if argv[0] == "scontrol":
        print("\n".join(NODES))
        return 0
    options = [word for word in argv[1:] if word.startswith("--")]
    command = argv[1 + len(options) :]
    (wait_s,) = [float(word.partition("=")[2]) for word in options if word.startswith("--wait=")]
    with open(os.environ["SRUN_OPTIONS"], "w") as file:
        file.write("\n".join(options))
    tasks = []
    for index, node in enumerate(NODES):
        environment = {**os.environ, "SLURMD_NODENAME": node, "NODE_IP": f"127.0.0.{index + 2}"}
        hangs = node in os.environ.get("HANGING_NODES", "").split()
        started = ["sleep", "600"] if hangs else command
        tasks.append(subprocess.Popen(started, env=environment, start_new_session=True))
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    end = None
    while any(task.poll() is None for task in tasks):
        if end is None and any(task.poll() is not None for task in tasks):
            end = time.monotonic() + wait_s
        if end is not None and time.monotonic() > end:
            for task in tasks:
                if task.poll() is None:
                    os.killpg(task.pid, signal.SIGKILL)
            end = None
        time.sleep(0.05)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
