"""Compares `rotary` with hand-worked numbers, the float64 formula and numerical derivatives."""

import pytest
import torch

from rl_kernel import rotary, telemetry
from rl_kernel.contract import CONTRACTS, max_error
from rl_kernel.mode import using
from rl_kernel.ops.rotary.cases import CASES, RotaryCase, formula

CONTRACT = CONTRACTS["rotary"]


def test_by_hand():
    """The pairs of head (1, 2, 3, 4) are (1, 3), turned by 90 degrees to (-3, 1), and (2, 4), by 180 to (-2, -4)."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 0.0, 1.0]]], requires_grad=True)
    cos, sin = torch.tensor([[[0.0, -1.0]]]), torch.tensor([[[1.0, 0.0]]])
    got = rotary(x, cos, sin)
    assert got.tolist() == [[[-3.0, -2.0, 1.0, -4.0], [0.0, 0.0, 5.0, -1.0]]]
    # The gradient is turned back: (-3, 1) -> (1, 3), (-2, -4) -> (2, 4).
    assert torch.equal(torch.autograd.grad(got, x, got.detach())[0], x)


@pytest.mark.parametrize("case", (*CASES, RotaryCase("many", 300, 8, 64)), ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contract(case, dtype):
    name = str(dtype).removeprefix("torch.")
    x, cos, sin, upstream = case.inputs(dtype)
    leaf, wide = x.detach().requires_grad_(), x.double().requires_grad_()
    got, want = rotary(leaf, cos, sin), formula(wide, cos, sin, dtype)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert max_error(got, want) <= CONTRACT.outputs[name].bound(want)
    (grad,) = torch.autograd.grad(got, leaf, upstream)
    (truth,) = torch.autograd.grad(want, wide, upstream.double())
    assert max_error(grad, truth) <= CONTRACT.gradients[name].bound(truth)


def test_a_coarser_angle_breaks_the_contract():
    """The tolerance separates float32 angles from angles rounded to bfloat16."""
    x, cos, sin, _ = RotaryCase("many", 300, 8, 64).inputs()
    want = formula(x, cos, sin)
    coarse = rotary(x, cos.bfloat16(), sin.bfloat16())
    assert max_error(coarse, want) > 1000 * CONTRACT.outputs["float32"].bound(want)


def test_gradcheck():
    x, cos, sin, _ = RotaryCase("few", 3, 2, 6, extra=4).inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos, sin), [x.detach().requires_grad_()])


def test_lengths_are_kept_and_a_turn_by_two_angles_is_one_by_their_sum():
    x, cos, sin, _ = RotaryCase("few", 6, 2, 8).inputs(torch.float64)
    once = rotary(x, cos.double(), sin.double())
    pairs = [t.unflatten(-1, (2, -1)).norm(dim=-2) for t in (x, once)]
    norm = (cos.double() ** 2 + sin.double() ** 2).sqrt()
    torch.testing.assert_close(pairs[1], pairs[0] * norm)
    twice = rotary(once, cos.double(), sin.double())
    both = cos.double() ** 2 - sin.double() ** 2, 2 * sin.double() * cos.double()
    torch.testing.assert_close(twice, rotary(x, *both))


def test_calls_are_counted_by_tokens():
    telemetry(reset=True)
    x, cos, sin, _ = RotaryCase("counted", 5, 3, 4).inputs()
    rotary(x, cos, sin)
    counts = telemetry(reset=True)["rotary"]
    assert (counts["calls"], counts["tokens"], counts["implementations"]) == (1, 5, {"reference": 1})
    assert sum(counts["fallbacks"].values()) == 1
    with using("off"):
        rotary(x, cos, sin)
    assert telemetry(reset=True)["rotary"]["fallbacks"] == {}


def tables(**changes):
    return {"x": torch.zeros(2, 3, 4), "cos": torch.zeros(2, 1, 2), "sin": torch.zeros(2, 1, 2)} | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4)}, r"x must have shape \[T, heads, D\], got \[2, 4\]"),
        ({"x": torch.zeros(2, 3, 5)}, r"x must have an even last dimension, got \[2, 3, 5\]; rotate whole heads"),
        ({"x": torch.zeros(2, 3, 4, dtype=torch.int32)}, "x must be one of float32.* got int32"),
        ({"cos": torch.zeros(2, 1, 4)}, r"cos must have shape \[2, 1, 2\], got \[2, 1, 4\]"),
        ({"sin": torch.zeros(3, 1, 2)}, r"sin must have shape \[2, 1, 2\], got \[3, 1, 2\]"),
        ({"sin": torch.zeros(2, 3, 2)}, r"sin must have shape \[2, 1, 2\], got \[2, 3, 2\]"),
        ({"cos": torch.zeros(2, 1, 2, device="meta")}, "cos must be on cpu, got meta"),
        ({"cos": torch.zeros(2, 1, 2, requires_grad=True)}, "cos must not require grad, .*detach"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rotary(**tables(**change))
