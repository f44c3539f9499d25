"""Where the trainer ranks of several hosts meet."""

from __future__ import annotations

import socket
from typing import Any


def open_store(host: str) -> tuple[Any, str]:
    """torch's store on a free port of `host`, an address of this machine, and the init_method by which ranks find it.

    To be kept by rank 0 until its process group exists: a port that was only looked for could be another's by the time
    it is used. The group finds the server of its own process by the port. It listens on that address alone; left to
    itself, torch's would on all interfaces.
    """
    import torch.distributed as dist

    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    return store, f"tcp://{host}:{port}"
