"""The store through which trainer ranks on several hosts connect."""

from __future__ import annotations

import socket
from typing import Any


def open_store(host: str) -> tuple[Any, str]:
    """torch's store on a free port of `host`, an address of this machine, and the ranks' init_method for it.

    Rank 0 keeps the store until its process group exists. If it only looked for a free port, another process could
    take the port before its use. The group finds its own process's server by the port. The store listens on `host`
    only; torch's default listens on all interfaces.
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
