"""A run that starts beside others and is measured alone: scripts/test-gpu.sh says when, by a file in its directory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from slime.rollout.generate import generate
from slime.types import Sample

ALONE_FROM = "alone_from"
"""The file: seconds since 1970 from which on the run had its GPUs to itself."""
ROLLOUTS_BESIDE = 2
"""Rollouts that may run before: their steps compile kernels and warm up, and are not counted."""
PATIENCE_S = 1800.0
POLL_S = 0.5


async def generate_when_alone(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """For --custom-generate-function-path: after ROLLOUTS_BESIDE rollouts, wait for ALONE_FROM. TimeoutError when it
    is not there in time."""
    if sample.index >= ROLLOUTS_BESIDE * args.rollout_batch_size * args.n_samples_per_prompt:
        file, end = Path(args.run_dir, ALONE_FROM), time.monotonic() + PATIENCE_S
        while not file.exists():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{file} must be there within {PATIENCE_S:g} s, got none; scripts/test-gpu.sh writes it"
                )
            await asyncio.sleep(POLL_S)
    return await generate(args, sample, sampling_params)
