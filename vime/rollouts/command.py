"""`vime rollout FLAGS`: generates for a run with --rollout-data-transport straw, with engines of this host.

FLAGS are those of the run, with the devices of this host (--rollout-num-gpus). The command waits for the run, follows
its weights, and ends when the run has ended. Its records are in hosts/NAME of the queue.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from slime.cluster.rollout_actor import RolloutGroup
from slime.config import Config
from slime.protocols import EnginePool
from slime.records.errors import FlagError
from slime.rollout.straw.flags import STRAW
from slime.rollout.straw.folder import folder_for, read_plain, require_same_sampling
from slime.rollout.stream.sampling_settings import sampling_settings
from slime.system.waiting import wait
from vime import driver
from vime.backends import parse_config
from vime.run.announced import AnnouncedWeights

USAGE = "usage: vime rollout FLAGS, with the flags of the run and --rollout-queue-run-id"


def main(argv: Sequence[str]) -> int:
    """Generates until the run has ended. Returns the exit code of `vime train`."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name = f"{socket.gethostname()}-{os.getpid()}"
    config = parse_config([*argv, "--debug-rollout-only"])
    if config.rollout.rollout_data_transport != STRAW:
        raise FlagError(
            "--rollout-data-transport",
            "be straw for vime rollout",
            config.rollout.rollout_data_transport,
            "give the flags of a run with a queue",
        )
    if "--rollout-queue-run-id" not in argv and not config.rollout.rollout_queue_run_id:
        raise FlagError("--rollout-queue-run-id", "be given", "none", USAGE)
    folder = folder_for(config)
    if (found := read_plain(folder.queue)) is not None:  # the rollout manager checks a queue that comes later
        require_same_sampling(found, sampling_settings(config))
    before = read_plain(folder.state)
    ended = before["start"] if before is not None and before["ended"] else 0
    own = [
        "--debug-rollout-only",
        *("--rollout-queue-run-id", folder.path.name, "--run-dir", str(folder.hosts / name)),
    ]
    source = AnnouncedWeights(folder.weights)
    work = driver.HostWork(source, partial(_serve, source, ended))
    return driver.main([*argv, *own], work)


def _serve(
    source: AnnouncedWeights, ended: int, config: Config, rollout: RolloutGroup, pool: EnginePool
) -> None:
    """Generates and sends each version of the weights to the engines, until the run has ended."""
    name = Path(config.logging.run_dir).name
    print(f"rollout host {name} generates for {folder_for(config).path}", flush=True)

    def follow() -> None:
        pool.check_health()
        if not source.look():
            return
        while True:
            try:
                pool.publish(source.version)
                break
            except Exception:  # border to the trainer's files: it removes older versions
                if not source.look():
                    raise
        rollout.allow(source.version)

    counts = wait(rollout.serve_queue(name, ended), follow)
    print(
        f"the run has ended: {counts['answered']} groups of this host were used, {counts['discarded']} came too late"
    )
