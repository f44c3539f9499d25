"""The reference of `rl_kernel.fp8` by hand, its exactness, its gradients, and its errors."""

from __future__ import annotations

import pytest
import torch

from rl_kernel import fp8
from rl_kernel.fp8 import reference
from rl_kernel.fp8.cases import CASES

E4M3 = torch.float8_e4m3fn


def test_rounding_by_hand():
    """The largest of 128 numbers becomes 448. With scale 2 / 448, the number 1 becomes 224, and 0.3 becomes 67.2,
    between the codes 64 and 72."""
    x = torch.zeros(1, 256)
    x[0, :3] = torch.tensor([-2.0, 1.0, 0.3])
    codes, scales = reference.quantize_rows(x)
    assert codes[0, :3].tolist() == [-448.0, 224.0, 64.0]
    assert scales.tolist() == [[pytest.approx(2 / 448), pytest.approx(1e-10 / 448)]]
    codes, scales = reference.quantize_rows(x, power_of_two=True)
    assert scales[0, 0] == 2**-7 and codes[0, :3].tolist() == [-256.0, 128.0, 40.0]


def test_a_power_of_two_stays_and_the_next_number_is_doubled():
    exact = torch.tensor([448.0 * 2**-9, 448.0]).float()
    assert reference.scales_from(exact, True).tolist() == [2**-9, 1.0]
    above = torch.nextafter(exact, torch.tensor(torch.inf))
    assert reference.scales_from(above, True).tolist() == [2**-8, 2.0]


def test_columns_and_blocks_are_rows_of_other_shapes():
    x = CASES[2].tensors()[0]
    codes, scales = reference.quantize_columns(x)
    assert codes.shape == (384, 256) and not codes[:, 130:].float().any()
    wide = torch.cat((x, x.new_zeros(126, 384))).T
    again, theirs = reference.quantize_rows(wide)
    assert torch.equal(codes.float(), again.float()) and torch.equal(scales, theirs)
    block = x[:128, :128]
    codes, scale = reference.quantize_blocks(block)
    row, one = reference.quantize_rows(block.reshape(1, -1).repeat_interleave(1, 0)[:, :128])
    assert scale.shape == (1, 1) and scale.item() == pytest.approx(block.abs().max().item() / 448)
    assert row.shape == (1, 128) and one.shape == (1, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_equal_those_of_the_dequantised_matrices(case):
    x, weights, upstream = (tensor.double() for tensor in case.tensors())
    ends = case.ends()
    out = reference.outputs(x, weights, ends, False)
    d_x = reference.input_gradients(upstream, weights, ends, False)
    d_weights = reference.weight_gradients(upstream, x, ends, False, x.dtype)

    def rounded(pair, block=False):
        codes, scales = pair
        wide = scales.double().repeat_interleave(128, 1)
        return codes.double() * (wide.repeat_interleave(128, 0) if block else wide)

    for expert, rows in enumerate(reference.expert_slices(ends, x)):
        weight = rounded(reference.quantize_blocks(weights[expert]), block=True)
        torch.testing.assert_close(
            out[rows], rounded(reference.quantize_rows(x[rows])) @ weight.T, rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            d_x[rows], rounded(reference.quantize_rows(upstream[rows])) @ weight, rtol=1e-12, atol=1e-12
        )
        left, right = (rounded(reference.quantize_columns(tensor[rows])) for tensor in (upstream, x))
        torch.testing.assert_close(d_weights[expert], left @ right.T, rtol=1e-12, atol=1e-10)


def test_the_layer_has_the_outputs_and_gradients_of_the_reference():
    x, weights, upstream = CASES[3].tensors()
    leaves = x.clone().requires_grad_(), weights[0].clone().requires_grad_()
    out = fp8.linear(leaves[0].view(128, 2, -1), leaves[1])
    out.backward(upstream.view_as(out))
    assert torch.equal(out.flatten(0, 1), reference.outputs(x, weights, None, False))
    assert torch.equal(leaves[0].grad, reference.input_gradients(upstream, weights, None, False))
    assert torch.equal(leaves[1].grad, reference.weight_gradients(upstream, x, None, False, x.dtype)[0])
    plain = x.double() @ weights[0].double().T
    assert 0.001 < (out.flatten(0, 1) - plain).norm() / plain.norm() < 0.05


def test_the_last_block_of_outputs_may_have_fewer_rows():
    x, weights, upstream = CASES[3].tensors()
    wide = torch.cat((weights[0][:200], torch.zeros(56, 256)))
    leaves = [x.clone().requires_grad_(), weights[0][:200].clone().requires_grad_()]
    wanted = [x.clone().requires_grad_(), wide.requires_grad_()]
    out, want = fp8.linear(*leaves), fp8.linear(*wanted)[:, :200]
    assert torch.equal(out, want)
    for found in (out, want):
        found.backward(upstream[:, :200])
    assert torch.equal(leaves[0].grad, wanted[0].grad) and torch.equal(leaves[1].grad, wanted[1].grad[:200])


def test_a_frozen_weight_has_no_gradient():
    x, weights, _ = CASES[3].tensors()
    x.requires_grad_()
    fp8.linear(x, weights[0]).sum().backward()
    assert x.grad is not None and weights.grad is None


def test_a_row_depends_on_no_other_row():
    x, weights, _ = CASES[3].tensors()
    whole = fp8.linear(x, weights[0])
    assert torch.equal(fp8.linear(x[100:101], weights[0])[0], whole[100])
    assert torch.equal(fp8.linear(x.flip(0), weights[0]).flip(0), whole)


def test_sizes_that_are_not_whole_blocks_are_errors():
    with pytest.raises(ValueError, match=r"weight must be a multiple of 128 on both sides, got \[128, 96\]"):
        fp8.linear(torch.zeros(2, 96), torch.zeros(128, 96))
    with pytest.raises(ValueError, match=r"weight must have shape \[M, 64\]"):
        fp8.linear(torch.zeros(2, 64), torch.zeros(128, 128))
    assert fp8.refusal(torch.device("cpu")) is None
    assert "has no kernels" in (fp8.refusal(torch.device("meta")) or "")


def test_a_kept_weight_is_rounded_once_and_forgotten_at_the_end():
    x, weights, upstream = CASES[3].tensors()
    weight = torch.nn.Parameter(weights[0].clone())
    want = fp8.linear(x, weights[0])
    with fp8.keep_rounded(gradients=True):
        assert torch.equal(fp8.linear(x, weight), want)
        weight.data.mul_(3.0)  # the rounded weight stays, so this write has no effect before the end
        leaf = x.clone().requires_grad_()
        out = fp8.linear(leaf, weight)
        out.backward(upstream)
        assert torch.equal(out, want)
        assert torch.equal(leaf.grad, reference.input_gradients(upstream, weights, None, False))
        other = fp8.linear(x, weight.detach() * 1.0)  # not a parameter
        assert not torch.equal(other, want)
    assert torch.equal(fp8.linear(x, weight), other)


def test_weights_of_experts_are_kept_together():
    x, weights, upstream = CASES[4].tensors()
    ends, parameters = CASES[4].ends(), [torch.nn.Parameter(weight.clone()) for weight in weights]
    want, columns = fp8.expert_outputs(x, fp8.round_experts(list(weights), False)[0], ends, columns=True)
    assert torch.equal(want, reference.outputs(x, weights, ends, False))
    with fp8.keep_rounded(gradients=True):
        rounded, kept = fp8.round_experts(parameters, False)
        assert kept and fp8.round_experts(parameters, False)[0] is rounded
        found = fp8.expert_gradients(upstream, columns, parameters, ends, rounded=rounded)
    assert torch.equal(found[0], reference.input_gradients(upstream, weights, ends, False))
    assert torch.equal(found[1], reference.weight_gradients(upstream, x, ends, False, x.dtype))
    assert not fp8.round_experts(parameters, False)[1]


def test_a_backward_may_add_the_gradient_of_its_weight_to_a_buffer():
    x, weights, upstream = CASES[3].tensors()
    weight, plain = (weights[0].clone().requires_grad_() for _ in range(2))
    total = torch.ones_like(weights[0])
    fp8.linear(x, weight, weight_grad=total).backward(upstream)
    fp8.linear(x, plain).backward(upstream)
    assert weight.grad is not None and weight.grad.shape == weight.shape
    assert torch.allclose(total - 1, plain.grad, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"weight_grad must have dtype float32|weight_grad must be one of float32"
    ):
        fp8.linear(x, weight, weight_grad=total.double())
    with pytest.raises(ValueError, match=r"weight_grad must have shape .*256"):
        fp8.linear(x, weight, weight_grad=total[:256])
    with pytest.raises(ValueError, match="weight_grad must be a multiple of 128 on both sides"):
        fp8.linear(x, weights[0, :200], weight_grad=total[:200])


def test_a_library_that_cannot_multiply_here_is_an_error():
    device = torch.device("cpu")
    assert fp8.products_refusal("torch", device) is None and not fp8.uses_deepgemm(torch.bfloat16)
    with pytest.raises(ValueError, match="products must be torch on cpu, got deepgemm; DeepGEMM's products"):
        fp8.choose_products("deepgemm", device)
    with pytest.raises(ValueError, match="products must be one of torch, deepgemm, got cublas; choose"):
        fp8.choose_products("cublas", device)
