"""A run waits until it has its GPUs alone, and scripts/test-gpu.sh writes the file that ends the wait."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import gpu_alone
import pytest
from gpu_alone import ALONE_FROM, generate_when_alone

from slime.types import Sample

FIRST, LATER = Sample(index=11), Sample(index=12)
"""Samples of the second and the third rollout, with 2 x 3 samples per rollout."""


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    async def at_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        return sample

    monkeypatch.setattr(gpu_alone, "generate", at_once)
    monkeypatch.setattr(gpu_alone, "POLL_S", 0.05)
    return Namespace(rollout_batch_size=2, n_samples_per_prompt=3, run_dir=str(tmp_path))


def test_the_third_rollout_waits_for_the_file(args: Namespace) -> None:
    async def made() -> list[bool]:
        tasks = [asyncio.create_task(generate_when_alone(args, sample, {})) for sample in (FIRST, LATER)]
        await asyncio.sleep(0.3)
        before = [task.done() for task in tasks]
        Path(args.run_dir, ALONE_FROM).touch()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        return before

    assert asyncio.run(made()) == [True, False]


def test_it_does_not_wait_for_ever(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_alone, "PATIENCE_S", 0.1)
    with pytest.raises(TimeoutError, match=f"{ALONE_FROM} must be there within 0.1 s"):
        asyncio.run(generate_when_alone(args, LATER, {}))


def test_the_script_writes_the_file_and_names_the_function() -> None:
    script = (Path(__file__).parents[2] / "scripts" / "test-gpu.sh").read_text()
    assert f'>"$OUT/$MODE/{ALONE_FROM}"' in script
    assert f"{generate_when_alone.__module__}.{generate_when_alone.__name__}" in script
