"""Checks of a loss (--custom-loss-function-path): its gradient, and its value on two data-parallel ranks."""

from __future__ import annotations

import math
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slime.hooks import Hook, load_function
from slime.types import Sample, TrainData
from vime.testing.paths import function_path
from vime.testing.ranks import run_ranks
from vime.testing.tiny_model import write_tiny_model
from vime.testing.trainer import Trained, make_samples, read_result, train_once

STEP = 1e-3
"""Length in logits of the step of the finite difference, in the direction of the gradient."""
GRADIENT, RANKS = 1e-2, 1e-4
"""Largest relative errors: of the slope along the gradient, and of gradient norm and weights on two ranks."""


def check_loss(loss: Hook | str, **flags: object) -> Trained:
    """Trains one step of the tiny model with the loss on one rank and on two ranks, and returns the step of one rank.

    Args:
        loss: the function of --custom-loss-function-path, or its path.
        flags: more flags of the run, with underscores.

    Raises AssertionError if the loss or its gradient is not finite, if the gradient differs from the difference
    quotient of the loss in float64 logits, or if two ranks get another gradient norm or other weights than one rank.
    """
    path = function_path(loss, "loss")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model")
        settings = {"loss_type": "custom_loss", "custom_loss_function_path": f"{__name__}.probe", **flags}
        run_ranks(_train_both, 2, (path, model, folder, make_samples(), settings))
        slopes = torch.load(folder / "slopes.pt", weights_only=True)  # ok: tensors and numbers only
        one, two = read_result(folder, 1), read_result(folder, 2)
    for value, slope, norm in slopes:
        assert math.isfinite(value) and math.isfinite(norm), (
            f"the loss must be finite, got {value} with gradient {norm}"
        )
        wrong = f"the gradient must be that of the loss, got {norm:.4g} where the loss rises by {slope:.4g} per unit"
        assert abs(slope - norm) <= GRADIENT * max(abs(norm), 1e-6), wrong
    first, second = (one_or_two.metrics["train/grad_norm"] for one_or_two in (one, two))
    differs = (
        f"two ranks must compute what one rank computes, got gradient norms {first:.6g} and {second:.6g}"
    )
    assert abs(first - second) <= RANKS * abs(first), (
        f"{differs}; sum with sum_of_sample_mean, which knows the whole batch"
    )
    for tensor in one.weights:
        torch.testing.assert_close(
            two.weights[tensor], one.weights[tensor], rtol=RANKS, atol=1e-6, msg=differs
        )
    return one


_user: Hook | None = None
_slopes: list[tuple[float, float, float]] = []


def probe(
    flat: Namespace, batch: TrainData, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Mapping[str, object]]:
    """Calls the user's loss in the trainer, and records the slope of the loss along its gradient."""
    assert _user is not None, "_train_both sets the loss"

    def value(at: Tensor) -> Tensor:
        found: Tensor = _user(flat, batch, at, sum_of_sample_mean)[0]
        return found

    with torch.enable_grad():
        own = logits.detach().clone().requires_grad_()
        centre = value(own)
        (gradient,) = torch.autograd.grad(centre, own)
    norm = gradient.norm().item()
    slope = 0.0
    if norm > 0:
        exact, direction = logits.detach().double(), gradient.double() / norm
        with torch.no_grad():
            ahead, behind = (value(exact + sign * STEP * direction).double().item() for sign in (1, -1))
        slope = (ahead - behind) / (2 * STEP)
    _slopes.append((centre.item(), slope, norm))
    result: tuple[Tensor, Mapping[str, object]] = _user(flat, batch, logits, sum_of_sample_mean)
    return result


def _train_both(
    rank: int, path: str, model: Path, folder: Path, samples: list[Sample], flags: Mapping[str, object]
) -> None:
    """Trains the step on one rank, which is rank 0, and then on both ranks."""
    global _user
    _user = load_function(path, "loss")
    if rank == 0:
        train_once(0, model, folder, samples, 1, flags)
        torch.save(_slopes, folder / "slopes.pt")
    train_once(rank, model, folder, samples, 2, flags)
