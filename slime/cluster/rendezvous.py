"""Opens the store through which trainer ranks on several hosts connect, and sets the interface of ranks on one host."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of ranks that are all on this host. Without it, gloo and NCCL listen on another interface of the host."""


def open_store(host: str) -> tuple[TCPStore, str]:
    """Returns torch's store on a free port of `host`, an address of this machine, and the ranks' init_method for it.

    Rank 0 keeps the store until its process group exists. If it only searched for a free port, another process could
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
