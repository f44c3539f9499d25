"""Tests of this folder are skipped without enough GPUs. With --require-gpu, a missing GPU is an error instead.

A test that leaves its process group is an error, and the next test starts without the group.
"""

import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch
import torch.distributed as dist

NEEDS = {"gpu": 1, "multi_gpu": 2}
"""Marker -> number of GPUs that its tests need."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="refuse to start where a test of tests/gpu would be skipped (give that path too)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Treats SIGTERM as Ctrl-C, so that fixtures end the runs that they started."""
    if config.getoption("--require-gpu", default=False):
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.hookimpl(trylast=True)  # after -m and -k have deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        needed = max((NEEDS.get(marker.name, 0) for marker in item.iter_markers()), default=0)
        if needed <= found:
            continue
        reason = f"needs {needed} CUDA GPU{'s' * (needed > 1)}, found {found}"
        if config.getoption("--require-gpu", default=False):
            raise pytest.UsageError(f"--require-gpu: {item.nodeid} {reason}")
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fails `item` if a process group is left after its fixtures, because later tests could not create theirs."""
    try:
        yield
    finally:
        left = dist.is_initialized()
        if left:
            if "megatron.core.parallel_state" in sys.modules:
                sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
            dist.destroy_process_group()
    assert not left, f"{item.name} left its process group; close its trainer or engine in a fixture"
