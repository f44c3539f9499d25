"""Runs in place of Ray's agent for runtime environments, until somebody asks for one.

Ray's node process (raylet) starts this agent for each node, and asks it only for actors and tasks that have a
`runtime_env`, which a run's own do not have. Ray's own agent takes 50 MiB and 0.5 s of a core. This file uses the
standard library only: it listens at the agent's address and becomes Ray's agent at the first connection. The raylet
repeats a request whose connection is closed.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

_PORT = "runtime_env_agent_port"
_FLAG = "--runtime-env-agent-port="


def main(argv: Sequence[str]) -> None:
    """`argv`: the command of Ray's agent. Returns when the raylet ends, because it holds the other end of stdin."""
    named = [token for token in argv if token.startswith("--") and "=" in token]
    flags = dict(token.removeprefix("--").split("=", 1) for token in named)
    address = flags["node-ip-address"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, int(flags["runtime-env-agent-port"])), family=family) as server:
        port = server.getsockname()[1]
        if "node-id" in flags:  # Ray 2.50 chooses the port before it starts the raylet
            place = Path(flags["session-dir"], f"{_PORT}_{flags['node-id']}")
            written = place.with_name(f"{place.name}.written")
            written.write_text(str(port), encoding="ascii")
            written.rename(place)  # so that the raylet reads a whole file
        while server not in select.select([sys.stdin, server], [], [])[0]:
            if not os.read(sys.stdin.fileno(), 4096):
                return
    os.execv(argv[0], [f"{_FLAG}{port}" if token.startswith(_FLAG) else token for token in argv])


if __name__ == "__main__":
    main(sys.argv[1:])
