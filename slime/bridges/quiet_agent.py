"""Replaces the agent of Ray's dashboard in a cluster that has no dashboard, and serves nothing.

Ray's node process (raylet) starts an agent for each node. It waits until the agent has written its ports to files, and
it ends when the agent ends. Ray's own agent takes 80 MiB and 0.7 s of a core to write that it has no port. This file
uses the standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_NONE = "-1"


def main(argv: Sequence[str]) -> None:
    """Runs until the raylet ends, which holds the other end of stdin. `argv` are the arguments of Ray's agent."""
    named = [token for token in argv if token.startswith("--") and "=" in token]
    flags = dict(token.removeprefix("--").split("=", 1) for token in named)
    if "node-id" in flags:  # Ray 2.50 chooses the ports before it starts the raylet
        for name in _PORTS:
            directory = Path(flags["session-dir"], f"{name}_{flags['node-id']}")
            written = directory.with_name(f"{directory.name}.written")
            written.write_text(_NONE, encoding="ascii")
            written.rename(directory)  # the rename makes the raylet read a whole file
    while os.read(sys.stdin.fileno(), 4096):
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
