"""Without a GPU, tests/rl_kernel runs the Triton kernels in Triton's interpreter; every other test runs as users do."""

import os
import signal
from pathlib import Path

import pytest
import torch

OPERATORS = Path(__file__).parent / "rl_kernel"
INTERPRET = not torch.cuda.is_available()

# Triton's own library is compiled or interpreted by what it finds when it is imported, and the first test file that
# pytest collects may import it.
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """A time limit ends a test session with SIGTERM: what its tests have started ends with it, as on Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one worker of pytest-xdist runs: a file, for its fixtures, and all files that start engines.

    Whole runs need most of two cores and have time limits, so they run one after the other, while another worker
    runs the files that need one core.
    """
    for item in items:
        name = "e2e" if item.get_closest_marker("e2e") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(name))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the item's fixtures: engines and trainers that a test starts inherit the environment."""
    if INTERPRET and OPERATORS in item.path.parents:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
