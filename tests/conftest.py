"""Configures the test processes and checks that a test file leaves nothing behind.

Without a GPU, tests/rl_kernel runs the Triton kernels in Triton's interpreter. Other tests do not use it.
"""

import atexit
import contextlib
import gc
import logging
import os
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Triton's interpreter uses numpy's threads for each product, and idle threads of numpy spin as torch's do. numpy
# reads the variable when torch loads it.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import torch

from slime.records import once

OPERATORS = Path(__file__).parent / "rl_kernel"
RUNS = Path(__file__).parent / "e2e"
INTERPRET = not torch.cuda.is_available()

# Triton decides at import whether to use its interpreter, and the first collected test file may import it.
if INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"

# A test process uses one core: scripts/test.sh runs one process per core, and idle threads of torch spin.
if INTERPRET:
    torch.set_num_threads(1)

FEATURE_RUNS = (
    "tests/gpu/features/test_features_gpu.py",
    "tests/gpu/features/test_family_steps_gpu.py",
)
LONGEST = ("tests/e2e/", "tests/house/test_tools.py", "tests/vime/vllm/test_vllm_oldest.py")
"""Test files that take longest: one worker runs the whole runs, and the other two files check types or an old
vLLM."""

SLACK = {"threads": 20, "open files": 30, "child processes": 4}
"""Number of threads, open files and child processes that a test file may leave behind. The first use of torch,
Ray or multiprocessing starts some that stay. For comparison, one trainer has 48 threads and 64 files."""
DEFAULT_RUN_DIR = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}$")
GONE_S = 60
"""Seconds in which stopped threads and processes must have ended."""

# The garbage collector is off during imports and collection, because these objects live as long as the process.
# It also skips them in tests: Megatron collects at each checkpoint, which took half a second with them.
gc.disable()

# This process and its children write the tables of the tests' prompt files here. `datasets` reads the variable at
# import.
PROMPTS = tempfile.TemporaryDirectory(prefix="vime-test-prompts-")
os.environ["HF_DATASETS_CACHE"] = PROMPTS.name


SEEDS = Path(__file__).parents[1] / ".hypothesis"
"""Folder in which hypothesis stores the cases that failed. It runs them first the next time."""


@pytest.fixture(params=[12, pytest.param(3000, marks=pytest.mark.slow)], ids=["smoke", "night"])
def fuzz(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`fuzz(check, strategy)` calls `check` with 12 cases of a strategy, the same cases in every run. The tests
    marked slow draw 3,000 new cases, or VIME_FUZZ_CASES. hypothesis prints a failing case in its smallest
    form, and the slow tests store it in .hypothesis."""
    import hypothesis
    from hypothesis.database import DirectoryBasedExampleDatabase

    few = request.param == 12
    cases = request.param if few else int(os.environ.get("VIME_FUZZ_CASES", request.param))
    chosen = hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None if few else DirectoryBasedExampleDatabase(SEEDS),
        print_blob=True,
        derandomize=few,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def run(check: Callable[[Any], None], strategy: Any) -> None:
        chosen(hypothesis.given(strategy)(lambda case: check(case)))()

    return run


def pytest_configure(config: pytest.Config) -> None:
    """Treats SIGTERM (from a time limit) as Ctrl-C, so that fixtures stop the processes that tests started.

    A script that starts pytest in the background makes it ignore Ctrl-C, and the processes that tests start would
    ignore it, too. So both signals are set.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    # A forked process that waits for a lock would miss a handler in Python, and a pool that ends it would wait forever.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the longest test files to the front, so that no worker starts one of them at the end."""
    items.sort(
        key=lambda item: next(
            (i for i, path in enumerate(LONGEST) if item.nodeid.startswith(path)), len(LONGEST)
        )
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Freezes the collected objects and turns the garbage collector on. pytest-xdist's main process, which
    collects nothing, runs this hook too.

    The interpreter frees modules at its end only if the collector may look at them. Before that, pytest itself collects
    twice, which takes seconds with all objects.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules a whole file on one worker, for its fixtures, all files that start engines on the same worker, and
    all house tests that read the repository on the same worker. The tests of FEATURE_RUNS share no fixture, so any
    worker takes the next one.

    Whole runs need most of two cores and have time limits, so they run one after the other, while another worker
    runs the files that need one core.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith("tests/e2e/"):
                return "engines"
            if file in FEATURE_RUNS:
                return nodeid
            # These files share the syntax trees of the repository. The other house tests start a tool.
            return "trees" if file.startswith("tests/house/") and file not in LONGEST else file

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets environment and priority before the item's fixtures, because engines and trainers inherit them.

    A worker that runs no whole run has a lower priority. The threads of an engine and a trainer wait for each
    other, so one thread without a core stops them all.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        with contextlib.suppress(PermissionError):  # only root may raise a priority again
            os.setpriority(os.PRIO_PROCESS, 0, 0 if RUNS in item.path.parents else 5)
    once.forget()
    logging.getLogger().setLevel(logging.WARNING)  # a library that vLLM's server imports sets it to ERROR
    for name in ("TRITON_INTERPRET", "OPENBLAS_NUM_THREADS"):
        if INTERPRET and OPERATORS in item.path.parents:
            os.environ[name] = "1"
        else:
            os.environ.pop(name, None)


def held() -> dict[str, int]:
    """Counts the threads, open files and child processes of this process (the keys of SLACK)."""
    process = psutil.Process()
    return {
        "threads": process.num_threads(),
        "open files": process.num_fds(),
        "child processes": sum(_runs(child) for child in process.children()),
    }


def reset_globals() -> None:
    """Undoes the settings of rl_kernel that a trainer of this process has made. Removes urllib's opener, which has the
    proxies of its first use, and Ray's token, which may be that of an earlier cluster."""
    if "ray._raylet" in sys.modules:
        from slime.cluster.ray_start import _read_authentication_again

        _read_authentication_again()
    urllib.request.install_opener(None)  # type: ignore[arg-type]  # urlopen makes a new one
    if "rl_kernel.mode" in sys.modules:  # otherwise the import of torch would take seconds
        from rl_kernel.mode import configure
        from rl_kernel.telemetry import set_timing

        configure()
        set_timing(False)


def unnamed_runs() -> set[str]:
    """Directories of runs that were started without --run-dir."""
    return {path.name for path in Path("runs").glob("*-*-*-*") if DEFAULT_RUN_DIR.search(path.name)}


def _runs(process: psutil.Process) -> bool:
    """Returns whether the process still runs. A zombie, whose exit status nobody has read yet, does not run."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails a test file that ends with more threads, open files or child processes than it began with, plus
    SLACK. The file must also leave no run in runs/.

    The counts are not checked on a GPU host: CUDA and NCCL have threads for the life of a process.

    The file ends with the environment variables that it began with, and begins with default settings of this process
    (`reset_globals`). Megatron sets variables, on which runs print notes. Without this, a test could fail because of a
    file that ran before it.

    The file begins with the objects of earlier files frozen. Megatron collects at each checkpoint, and a process that
    has run the house tests has two million objects, so each of these collections took a second.
    """
    gc.collect()
    gc.freeze()
    reset_globals()
    before, runs, end = held(), unnamed_runs(), None
    environment = dict(os.environ)
    yield
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(environment)
    more = unnamed_runs() - runs
    assert not more, (
        f"this file, or one that ran beside it, left runs/{{{','.join(sorted(more))}}}; give a run_dir"
    )
    if not INTERPRET:
        return
    while more := {name: count for name, count in held().items() if count > before[name] + SLACK[name]}:
        end = end or time.monotonic() + GONE_S
        assert time.monotonic() < end, (
            f"this file must leave nothing behind, got {more} after {before}; close it"
        )
        time.sleep(0.1)


@pytest.fixture
def products_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Triton's interpreter multiply tiles in float64, so that bits follow from a kernel alone. It multiplies with
    numpy, whose sums depend on the row."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        total = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
