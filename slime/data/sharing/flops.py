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


def forward_flops(
    data: TrainData,
    columns: Sequence[str],
    hf_config: Hf,
    *,
    share_prompts: bool,
    first_step: bool = True,
) -> float:
    """Returns the FLOPs of a forward pass over a rank's samples. A prompt that a micro-batch shares counts once.

    `columns` are the columns that the micro-batches carry, as in `pack`. With `first_step`, the samples of the first
    step count, too.
    """
    flops, vision = ForwardFlops(hf_config), read_decoder(hf_config).vision
    total = 0.0
    for samples in data["micro_batch_indices"][0 if first_step else data["num_microbatches"][0] :]:
        lengths = ((data["total_lengths"][i], data["response_lengths"][i]) for i in samples)
        total += sum(flops(n, response) for n, response in lengths)
        if share_prompts:
            images = sample_images(data, samples, vision)
            taken = (n for _, n in shared_prompts(data, samples, columns, images))
            total -= sum(flops(n, 0) for n in taken)
    return total
