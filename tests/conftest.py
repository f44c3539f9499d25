"""Without a GPU, tests/rl_kernel runs the Triton kernels in Triton's interpreter. Other tests do not use it."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

OPERATORS = Path(__file__).parent / "rl_kernel"
INTERPRET = not torch.cuda.is_available()

# Triton decides at import whether to use its interpreter, and the first test file that pytest collects may import it.
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Treat SIGTERM (from a time limit) as Ctrl-C, so that fixtures stop the processes that tests started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """What one worker of pytest-xdist runs: a file, for its fixtures, and all files that start engines.

    Whole runs need most of two cores and have time limits, so they run one after the other, while another worker
    runs the files that need one core.
    """
    for item in items:
        name = "e2e" if item.get_closest_marker("e2e") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(name))
    yield  # pytest-xdist reads the marks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the environment before the item's fixtures, because engines and trainers inherit it."""
    if INTERPRET and OPERATORS in item.path.parents:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
