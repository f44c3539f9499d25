"""Tests our operators behind upstream vime's interface; the test has its own records with the same fields."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks

import rl_kernel
from rl_kernel.contract import contract_id
from rl_kernel.integrations.vime.linear_logp import Unavailable, provider
from rl_kernel.mode import using

T, V, REAL, H = 9, 16, 13, 6


@dataclass(frozen=True)
class Layout:
    world_size: int = 1
    rank: int = 0
    layout: str = "single"


@dataclass(frozen=True)
class Request:
    """The fields of upstream's record."""

    logits: torch.Tensor
    target_ids: torch.Tensor
    tensor_parallel_group: Any = None
    context_parallel: Layout = Layout()
    with_entropy: bool = True
    with_entropy_grad: bool = True
    chunk_size: int = 4
    log_prob_keep_mask: torch.Tensor | None = None
    metadata: Any = None
    hidden: torch.Tensor | None = None
    lm_head_weight: torch.Tensor | None = None
    lm_head_bias: torch.Tensor | None = None
    vocab_start_index: int = 0
    global_vocab_size: int | None = None
    real_vocab_size: int | None = None
    temperature: float | torch.Tensor | None = None


@dataclass(frozen=True)
class OldRequest:
    """The fields of the record's first version, which has no hidden states."""

    logits: torch.Tensor
    target_ids: torch.Tensor
    tensor_parallel_group: Any = None
    with_entropy: bool = True
    with_entropy_grad: bool = True
    log_prob_keep_mask: torch.Tensor | None = None


def tensors(dtype=torch.float64, rows=T):
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, H), (V, H), (V,))
    )
    return hidden, weight, bias, torch.randint(0, REAL, (rows,), generator=generator)


TEMPERATURE = torch.linspace(0.5, 2, T, dtype=torch.float64)


def formula(hidden, weight, bias, targets, temperature, keep=None):
    """Returns, in float64, log-probs [T, 1] over the kept columns and entropy [T] over all columns that are not
    padding."""
    logits = ((hidden @ weight.T + bias) / torch.as_tensor(temperature).reshape(-1, 1))[:, :REAL]
    kept = logits if keep is None else logits.masked_fill(~keep[:, :REAL], -torch.inf)
    log_p = logits.log_softmax(-1)
    return kept.log_softmax(-1).gather(1, targets[:, None]), -(log_p.exp() * log_p).sum(-1)


def asked(hidden, weight, bias, targets, temperature, /, **changes):
    logits = (hidden @ weight.T + bias) / torch.as_tensor(temperature).reshape(-1, 1)
    fields = {"hidden": hidden, "lm_head_weight": weight, "lm_head_bias": bias, "temperature": temperature}
    return Request(logits, targets, global_vocab_size=V, real_vocab_size=REAL, **fields | changes)


def gradients(found, leaves):
    log_probs, entropy = found
    loss = (log_probs[:, 0] * torch.linspace(-1, 1, len(log_probs))).sum() + 0.3 * entropy.sum()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("temperature", [0.7, torch.tensor(0.7), torch.tensor([0.7]), TEMPERATURE])
@pytest.mark.parametrize("inputs", ["hidden", "logits"])
def test_log_probs_and_entropy_with_their_gradients(temperature, inputs):
    *leaves, targets = tensors()
    without = {} if inputs == "hidden" else dict.fromkeys(("hidden", "lm_head_weight", "lm_head_bias"))
    result = provider(asked(*leaves, targets, temperature, **without))
    wanted = formula(*leaves, targets, temperature)
    assert result.selected_logprobs.shape == (T, 1) and result.entropy.shape == (T,)
    torch.testing.assert_close(result.selected_logprobs, wanted[0])
    torch.testing.assert_close(result.entropy, wanted[1])
    for a, b in zip(
        gradients((result.selected_logprobs, result.entropy), leaves), gradients(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(a, b)
    operator = "linear_logp" if inputs == "hidden" else "logp"
    assert (result.backend_id, result.contract_id) == (
        f"rl_kernel.{operator}.reference",
        contract_id(operator),
    )
    assert result.provenance["inputs"] == ("hidden states and weight" if inputs == "hidden" else "logits")


def test_hidden_states_need_no_logits():
    """The logits have no values, so the test fails if a number is read."""
    *leaves, targets = tensors()
    request = replace(asked(*leaves, targets, 1.0), logits=torch.full((T, V), torch.nan, dtype=torch.float64))
    result = provider(request)
    torch.testing.assert_close(result.selected_logprobs, formula(*leaves, targets, 1.0)[0])


@pytest.mark.parametrize("missing", ["hidden", "lm_head_weight", "temperature"])
def test_logits_where_the_layer_is_not_complete(missing):
    *leaves, targets = tensors()
    result = provider(asked(*leaves, targets, 0.7, **{missing: None}))
    assert result.provenance["operator"] == "logp"
    torch.testing.assert_close(result.selected_logprobs, formula(*leaves, targets, 0.7)[0])


def test_logits_where_hidden_states_have_lost_their_gradient():
    *leaves, targets = tensors()
    request = asked(*leaves, targets, 1.0)
    result = provider(replace(request, hidden=request.hidden.detach()))
    wanted = formula(*leaves, targets, 1.0)
    for a, b in zip(
        gradients((result.selected_logprobs, result.entropy), leaves), gradients(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_a_keep_mask_bounds_the_log_prob_alone():
    *leaves, targets = tensors()
    keep = torch.arange(V) % 3 == (torch.arange(T) % 3)[:, None]
    keep[torch.arange(T), targets] = True
    keep[0] = True
    result = provider(asked(*leaves, targets, TEMPERATURE, log_prob_keep_mask=keep))
    wanted = formula(*leaves, targets, TEMPERATURE, keep)
    torch.testing.assert_close(result.selected_logprobs, wanted[0])
    torch.testing.assert_close(result.entropy, wanted[1])
    for a, b in zip(
        gradients((result.selected_logprobs, result.entropy), leaves), gradients(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_the_entropy_as_asked_for():
    *leaves, targets = tensors()
    for keep in (None, torch.ones(T, V, dtype=torch.bool)):
        metric = provider(asked(*leaves, targets, 1.0, with_entropy_grad=False, log_prob_keep_mask=keep))
        assert metric.selected_logprobs.requires_grad and not metric.entropy.requires_grad
        assert (
            provider(asked(*leaves, targets, 1.0, with_entropy=False, log_prob_keep_mask=keep)).entropy
            is None
        )


def test_the_first_version_of_the_record():
    *leaves, targets = tensors()
    logits = (leaves[0] @ leaves[1].T)[:, :REAL]
    result = provider(OldRequest(logits, targets))
    torch.testing.assert_close(result.selected_logprobs, logits.log_softmax(-1).gather(1, targets[:, None]))


def test_no_rows():
    """A context-parallel rank may have no rows."""
    *leaves, targets = tensors(rows=0)
    result = provider(asked(*leaves, targets, 0.7, context_parallel=Layout(2, 1, "zigzag")))
    assert result.selected_logprobs.shape == (0, 1) and result.entropy.shape == (0,)
    assert result.selected_logprobs.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_parallel_group": "a group"},
            "tensor_parallel_group must be a group of torch.distributed, got str",
        ),
        ({"target_ids": torch.zeros(T, dtype=torch.int16)}, "target_ids must be int64 or int32, got int16"),
        (
            {"hidden": torch.zeros(T, H, dtype=torch.complex64, requires_grad=True)},
            "hidden must be one of float32,.*got complex64",
        ),
        (
            {"hidden": None, "logits": torch.zeros(T, V, dtype=torch.complex64)},
            "logits must be one of float32,",
        ),
    ],
)
def test_what_the_operators_do_not_serve_is_unavailable(changes, message):
    request = replace(asked(*tensors(), 1.0), **changes)
    with pytest.raises(Unavailable, match=message) as error:
        provider(request)
    assert error.value.selected_logprob_provider_unavailable


@pytest.mark.parametrize("inputs", ["hidden", "logits"])
def test_strict_mode_of_rl_kernel_is_unavailable_without_kernels(inputs):
    *leaves, targets = tensors(torch.float32)
    request = asked(*leaves, targets, 1.0)
    with using("strict"), pytest.raises(Unavailable, match="rl_kernel is in mode strict, and"):
        provider(request if inputs == "hidden" else replace(request, hidden=None))


def test_wrong_inputs_are_errors_and_no_reason_to_fall_back():
    request = asked(*tensors(), 1.0)
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 13\)"):
        provider(replace(request, target_ids=torch.full((T,), V)))


def of_a_rank(rank: int, folder: str) -> None:
    """Runs one of two tensor-parallel ranks, each with half of the columns; the second shard is padded."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    *leaves, targets = tensors()
    wanted = formula(*leaves, targets, TEMPERATURE)
    true = gradients(wanted, leaves)
    half = slice(rank * V // 2, (rank + 1) * V // 2)
    hidden, weight, bias = (
        leaves[0].detach().requires_grad_(),
        leaves[1][half].detach(),
        leaves[2][half].detach(),
    )
    own = [hidden, weight.requires_grad_(), bias.requires_grad_()]
    group = dist.group.WORLD
    keep = torch.ones(T, V // 2, dtype=torch.bool)
    for mask in (None, keep):
        request = asked(*own, targets, TEMPERATURE, tensor_parallel_group=group, vocab_start_index=half.start)
        result = provider(replace(request, log_prob_keep_mask=mask))
        torch.testing.assert_close(result.selected_logprobs, wanted[0])
        torch.testing.assert_close(result.entropy, wanted[1])
        found = list(gradients((result.selected_logprobs, result.entropy), own))
        if mask is not None:  # for logits, the caller's product gives each rank its own part
            dist.all_reduce(found[0])
        for a, b in zip(found, (true[0], true[1][half], true[2][half]), strict=True):
            torch.testing.assert_close(a, b)
        assert result.provenance["tensor_parallel_size"] == 2
    # A record without sizes means equal shards, in the order of the ranks.
    logits = ((leaves[0] @ leaves[1].T)[:, half]).detach()
    first = provider(OldRequest(logits, targets, group))
    whole = (leaves[0] @ leaves[1].T).log_softmax(-1).gather(1, targets[:, None])
    torch.testing.assert_close(first.selected_logprobs, whole.detach())
    dist.destroy_process_group()


def test_two_tensor_parallel_ranks(tmp_path):
    on_ranks(of_a_rank, str(tmp_path), ranks=2)


def test_it_imports_nothing_of_a_trainer():
    code = (
        "import sys, rl_kernel.integrations.vime.linear_logp; "
        "print([m for m in sys.modules if m.split('.')[0] in ('slime', 'vime', 'megatron', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_fallback_of_auto_is_counted():
    rl_kernel.telemetry(reset=True)
    provider(asked(*tensors(torch.float32), 1.0))
    assert sum(rl_kernel.telemetry(reset=True)["linear_logp"]["fallbacks"].values()) == 1
