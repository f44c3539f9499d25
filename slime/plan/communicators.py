"""GPU memory of NCCL's communicators of a trainer rank: the communicators that its layout creates, and their buffers.

NCCL gives each channel of a communicator a FIFO for each peer that it receives from. The parts of the FIFO with NCCL's
defaults are NCCL_BUFFSIZE 4 MiB, 4.7 MiB of LL128, 0.5 MiB of LL, together 10 MiB in its steps of 2 MiB. Two structures
of 2 MiB for the two directions are added (measured for an all-to-all of eight H100: NVIDIA/nccl issue 1685). On H100
and H200 NCCL uses 24 channels for collectives, and 32 per peer for sends. It connects when a group first computes such
a collective:

    ring       one peer to receive from       all-gather, reduce-scatter, broadcast
    tree       the other neighbour, too       all-reduce
    exchange   every other rank               all-to-all
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from slime.config import Config
from slime.weight_sync.registry import CHANNELS

CHANNELS_OF_COLLECTIVES, CHANNELS_OF_SENDS = 24, 32
_GRANULE = 2 * 2**20
_BUFFER, _LL128, _LL = 4 * 2**20, 120 * 640 * 8 * 8, 8 * 512 * 8 * 16
"""Bytes of NCCL_BUFFSIZE, and of two protocols for small messages: values per thread x threads x steps x bytes."""
_STRUCTURES = 2 * _GRANULE
OWN = 0.3 * 2**30
"""Bytes of a communicator without its connections. The value is chosen so that the sum of a Qwen3-30B-A3B on four H200
equals the measured sum. Communicators of a single rank are in `BESIDES_TRAINER`."""

Use = Literal["ring", "tree", "exchange", "neighbours"]


@dataclass(frozen=True)
class Communicator:
    """A group of ranks that communicate."""

    name: str
    ranks: int
    use: Use

    def bytes(self, env: Mapping[str, object]) -> float:
        """Returns the bytes on every GPU of the group. `env` has the variables of NCCL that were given."""
        most = min((int(str(env[name])) for name in _MOST if name in env), default=CHANNELS_OF_COLLECTIVES)
        channels, others = min(CHANNELS_OF_COLLECTIVES, most), self.ranks - 1
        peers = {"ring": 1, "tree": min(2, others), "exchange": others, "neighbours": min(2, others)}[
            self.use
        ]
        if self.use in ("exchange", "neighbours"):
            channels = int(str(env.get("NCCL_MAX_P2P_NCHANNELS", CHANNELS_OF_SENDS)))
        return OWN + peers * channels * connection_bytes(env)


_MOST = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")


def connection_bytes(env: Mapping[str, object]) -> int:
    """Returns the bytes of a channel to a peer."""
    fifo = int(str(env.get("NCCL_BUFFSIZE", _BUFFER))) + _LL128 + _LL
    return -(-fifo // _GRANULE) * _GRANULE + _STRUCTURES


def trainer_communicators(c: Config) -> Iterator[Communicator]:
    """Yields the communicators of a trainer rank that have another rank. `c` is the configuration of its group of
    ranks."""
    m, world = c.megatron, c.world_size
    tp, pp, cp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    dp, ep, etp = c.data_parallel_size, m.expert_model_parallel_size, m.expert_tensor_parallel
    norm = world if m.use_distributed_optimizer else tp * pp
    found: list[tuple[str, int, Use]] = [
        ("all ranks", world, "ring"),
        ("gradient norm", norm, "tree"),
        ("tensor parallel", tp, "tree"),
        ("pipeline", pp, "neighbours"),
        ("context parallel", cp, "ring" if m.cp_comm_type == "all_gather" else "exchange"),
        ("data parallel", dp * cp, "ring"),
        ("metrics", dp, "tree"),
    ]
    if ep > 1:
        found += [("experts", ep, "exchange"), ("experts' counts", ep * etp, "ring")]
    if m.has_expert_layout:
        found.append(("copies of experts", world // (ep * etp * pp), "ring"))
    if c.num_engines and CHANNELS[c.weight_update.update_weight_transport].collective:
        found.append(("weights", world + c.cluster.rollout_num_gpus, "ring"))
    yield from (Communicator(*one) for one in found if one[1] > 1)


def communicator_bytes(c: Config) -> float:
    """Returns the bytes of a trainer rank's communicators, in total."""
    return sum(one.bytes(c.cluster.train_env_vars) for one in trainer_communicators(c))


def engine_communicator_bytes(c: Config) -> float:
    """Returns the communicator bytes of an engine on several GPUs, which a sleeping engine keeps. torch and the engine
    create the same group, so it counts twice."""
    ranks = c.cluster.rollout_num_gpus_per_engine
    return 2 * Communicator("engine", ranks, "tree").bytes(c.engine.backend_env) if ranks > 1 else 0.0
