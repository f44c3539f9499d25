"""Trainer ranks meet at a port that no other process can take meanwhile."""

from __future__ import annotations

import errno
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.cluster.rendezvous import open_store

HOST = "127.0.0.2"
"""An address of this machine other than the one on which every server here listens."""


def meet(init_method: str, rank: int) -> float:
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def test_the_port_is_held_until_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, init_method = open_store(HOST)
    port = int(init_method.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError) as refused:
        other.bind((HOST, port))
    assert refused.value.errno == errno.EADDRINUSE
    with socket.socket() as other:
        other.bind(("127.0.0.3", port))  # it listens on the given address only
    process = mp.get_context("spawn").Process(target=meet, args=(init_method, 1))
    process.start()
    assert meet(init_method, 0) == 3
    process.join(60)
    assert process.exitcode == 0
    del store
