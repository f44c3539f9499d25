"""The FLOPs of a rank's samples, where a prompt that a micro-batch shares counts once."""

from __future__ import annotations

from collections.abc import Sequence

from slime.data.sharing.prompts import sample_images, shared_prompts
from slime.models import read_decoder
from slime.models.decoder import Hf
from slime.plan.flops import ForwardFlops, PredictionFlops
from slime.types import TrainData


def prediction_flops(data: TrainData, hf_config: Hf) -> float:
    """Returns the FLOPs of a training pass through the layers of multi-token prediction, over a rank's samples."""
    flops = PredictionFlops(hf_config)
    samples = (i for batch in data["micro_batch_indices"] for i in batch)
    return sum(flops(data["total_lengths"][i], data["response_lengths"][i]) for i in samples)


def micro_batch_flops(
    data: TrainData, columns: Sequence[str], hf_config: Hf, *, share_prompts: bool
) -> list[float]:
    """Returns the FLOPs of a forward pass over each of a rank's micro-batches. A prompt that a micro-batch shares
    counts once. `columns` are the columns that the micro-batches carry, as in `pack`."""
    flops, vision = ForwardFlops(hf_config), read_decoder(hf_config).vision
    found = []
    for samples in data["micro_batch_indices"]:
        total = sum(flops(data["total_lengths"][i], data["response_lengths"][i]) for i in samples)
        if share_prompts:
            images = sample_images(data, samples, vision)
            total -= sum(flops(n, 0) for _, n in shared_prompts(data, samples, columns, images))
        found.append(total)
    return found
