"""Without a GPU, tests/rl_kernel runs the Triton kernels in Triton's interpreter. Other tests do not use it."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

OPERATORS = Path(__file__).parent / "rl_kernel"
RUNS = Path(__file__).parent / "e2e"
INTERPRET = not torch.cuda.is_available()

# Triton decides at import whether to use its interpreter, and the first test file that pytest collects may import it.
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"

# Tables of the tests' prompt files, for this process and those that it starts. `datasets` reads this at import.
PROMPTS = tempfile.TemporaryDirectory(prefix="vime-test-prompts-")
os.environ["HF_DATASETS_CACHE"] = PROMPTS.name


def pytest_configure(config: pytest.Config) -> None:
    """Treat SIGTERM (from a time limit) as Ctrl-C, so that fixtures stop the processes that tests started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What one worker of pytest-xdist runs: a file, for its fixtures, and all files that start engines.

    Whole runs need most of two cores and have time limits, so they run one after the other, while another worker
    runs the files that need one core.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "engines" if file.startswith("tests/e2e/") else file

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set environment and priority before the item's fixtures, because engines and trainers inherit them.

    A worker that runs no whole run has a lower priority. The threads of an engine and a trainer wait for each other, so
    one thread without a core stops them all.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        with contextlib.suppress(PermissionError):  # only root may raise a priority again
            os.setpriority(os.PRIO_PROCESS, 0, 0 if RUNS in item.path.parents else 5)
    if INTERPRET and OPERATORS in item.path.parents:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
