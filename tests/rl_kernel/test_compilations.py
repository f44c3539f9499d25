"""Other numbers of tokens, and columns with another start, must not make Triton compile again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from launch_keys import Key, Launches, binder_of, launched_kernels, launches  # noqa: F401
from trainer_steps import DEVICE, LONG, SIZES, STARTS, STEPS, Batch
from triton.runtime.jit import JITFunction

from rl_kernel.invariant import kernels

FIRST = ((300, 0), (2100, 3), (16, 0))
"""Tokens and start of a first step that compiles everything. After any first step, the other steps compile nothing
more."""
PRODUCT, TILED = (
    "linear_logp.kernels._exp_product_kernel",
    {"exponentials of tiles", "one pass of exponentials"},
)
"""A kernel with its steps that compile two more products if a first product is larger than the workspace: one for
columns whose tile is not kept, and one for a tile that is computed again."""


def differences(key: Key, known: set[Key]) -> dict[str, tuple[object, object]]:
    """Compares a key with the most similar known key: argument -> (its value in the known key, its value in this
    key)."""
    all_of_them = [
        {name: (dict(old).get(name), new) for name, new in key if dict(old).get(name) != new} for old in known
    ]
    return min(all_of_them, key=len, default={"kernel": (None, "new")})


@pytest.mark.parametrize("name", STEPS)
def test_no_step_after_the_first_compiles(name: str, launches: Launches) -> None:  # noqa: F811
    check(name, launches, SIZES, FIRST)


@pytest.mark.parametrize("name", ["losses", "reductions", "advantages"])
def test_no_step_of_many_tokens_after_the_first_compiles(name: str, launches: Launches) -> None:  # noqa: F811
    """Up to 4,096 tokens, a separate kernel computes a loss in one program."""
    check(name, launches, LONG, [(LONG[0], 0), (LONG[-1], 0)])


def check(name: str, launches: Launches, sizes: Sequence[int], firsts: Sequence[tuple[int, int]]) -> None:  # noqa: F811
    made = {}
    for tokens, start in itertools.product(sizes, STARTS):
        STEPS[name](Batch(tokens, start))
        made[tokens, start] = launches.take()
    again = {}
    for first, (batch, found) in itertools.product(firsts, made.items()):
        for kernel, keys in found.items():
            known = made[first].get(kernel, set())
            if kernel == PRODUCT and name in TILED and first == FIRST[-1]:
                continue
            for key in keys - known:
                what = differences(key, known)
                again.setdefault(f"{kernel}: {', '.join(what)}", f"{first} {batch} {what}")
    assert not again, "\n".join(f"{what} {values}" for what, values in again.items())


def test_the_steps_launch_every_kernel(launches: Launches) -> None:  # noqa: F811
    for step in STEPS.values():
        step(Batch(SIZES[0], 0))
    missing = launched_kernels().keys() - launches.take().keys()
    assert not missing, f"launch these kernels in a step of STEPS: {sorted(missing)}"


def test_a_row_alone_has_the_code_of_many_rows(launches: Launches) -> None:  # noqa: F811
    """The order of a sum follows from the code. torch calls a single row contiguous at any distance, and an engine's
    logits are columns of wider rows."""
    keys = []
    for rows in (5, 1):
        kernels.log_softmax(torch.ones(rows, 320, dtype=torch.bfloat16, device=DEVICE)[:, :262].float())
        kernels.log_softmax(torch.ones(rows, 264, device=DEVICE)[:, :262].contiguous())
        gain = torch.ones(72, dtype=torch.bfloat16, device=DEVICE)
        wide = torch.ones(rows, 160, dtype=torch.bfloat16, device=DEVICE)[:, :72]
        kernels.rms_norm(wide.contiguous(), gain, 1e-6)
        kernels.rms_norm(wide.contiguous().view(rows, 1, 72), gain, 1e-6, wide.contiguous().view(rows, 1, 72))
        keys.append(launches.take())
    assert keys[0] == keys[1]


def test_a_kernel_that_is_compiled_for_multiples_of_16_is_found(launches: Launches) -> None:  # noqa: F811
    """The kernel is compiled without the argument of its decorator."""
    kernel = launched_kernels()["masked.kernels.whiten_kernel"]
    launches.binders[kernel] = binder_of(JITFunction(kernel.fn))
    with pytest.raises(AssertionError, match="masked.kernels.whiten_kernel: E "):
        check("reductions", launches, SIZES, FIRST)
