"""Delays a run that starts while other runs use its GPUs. scripts/test-gpu.sh writes a file when the run is alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from slime.rollout.generate import generate
from slime.types import Sample

ALONE_FROM = "alone_from"
"""File with the time, in seconds since 1970, from which on the run is alone on its GPUs."""
ROLLOUTS_BESIDE = 2
"""Number of rollouts before this time. Their steps compile kernels and warm up, and do not count."""
PATIENCE_S = 1800.0
POLL_S = 0.5


async def generate_when_alone(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates a sample, and waits for ALONE_FROM after ROLLOUTS_BESIDE rollouts. For --custom-generate-function-path.
    TimeoutError if the file does not appear in time."""
    if sample.index >= ROLLOUTS_BESIDE * args.rollout_batch_size * args.n_samples_per_prompt:
        file, end = Path(args.run_dir, ALONE_FROM), time.monotonic() + PATIENCE_S
        while not file.exists():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{file} must be there within {PATIENCE_S:g} s, got none; scripts/test-gpu.sh writes it"
                )
            await asyncio.sleep(POLL_S)
    return await generate(args, sample, sampling_params)
