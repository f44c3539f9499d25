"""What leaves a trainer rank: the weights that engines get."""

from __future__ import annotations

from pathlib import Path

import torch

from slime.config import Config
from slime.weight_sync.channel import Export, TrainerPlace
from slime.weight_sync.publisher import Publisher


def publisher(config: Config, device: torch.device, export: Export) -> Publisher:
    """The publisher of this rank's weights, which `export` gives."""
    # half: the error that names an engine that hangs comes before those of the other ranks, which wait for rank 0
    timeout_s = 30.0 * config.cluster.distributed_timeout_minutes
    flags = config.weight_update
    assert flags.weight_dir is not None and flags.update_weight_transport is not None
    place = TrainerPlace(Path(flags.weight_dir), flags.update_weight_buffer_size, device, timeout_s)
    compare = flags.check_weight_update_equal
    return Publisher.of(flags.update_weight_transport, place, export, compare=compare)
