"""Tests both kinds of layers with a running state: packed rows that share nothing, context-parallel ranks that share
heads, and the memory that a plan counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from family_cases import CASES
from megatron_cases import (
    VOCAB,
    assert_gradients_equal,
    compute_part,
    hidden_of,
    make_config,
    packed_logits,
    tiny_checkpoint,
)
from rank_processes import on_ranks
from torch import Tensor, nn

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import load_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import build_model, unwrap
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.recurrent.gated_delta_net import CHUNK, PLAIN, GatedDeltaNet
from slime.megatron_backend.model.recurrent.mamba import MambaMixer
from slime.megatron_backend.model.recurrent.packed_rows import keep_inputs
from slime.megatron_backend.parallel import destroy_parallel, init_parallel

pytestmark = pytest.mark.usefixtures("single_rank")

LENGTHS = [3, CHUNK + 9, 1, 2 * CHUNK, 20]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module", params=["qwen3-next", "nemotron-3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case, directory = CASES[request.param], tmp_path_factory.mktemp("hf")
    tiny_checkpoint(directory, case.kind, **case.shape)
    return directory


def load_model(directory: Path, **settings: Any) -> Any:
    model = build_model(load_hf_config(directory), make_config(**settings))
    load_hf(model, directory)
    return model


def batch(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def test_a_packed_row_is_its_sequences_one_by_one(tiny: Path) -> None:
    """Logits are equal, and the gradient of every parameter, with and without recomputation of layers."""

    def compute(rows: list[list[Tensor]], **settings: Any) -> tuple[Tensor, list[Tensor]]:
        model = load_model(tiny, **settings)
        logits = torch.cat([packed_logits(model, row) for row in rows])
        logits.log_softmax(-1).square().mean().backward()
        return logits.detach(), [p.main_grad.clone() for p in unwrap(model).parameters()]  # type: ignore[attr-defined]

    together, gradients = compute([batch(0)])
    for alone, wanted in (compute([[tokens] for tokens in batch(0)]), compute([batch(0)], overrides=FULL)):
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        for mine, want in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5 * want.abs().max().item() + 1e-8)


def test_a_sample_does_not_change_a_bit_of_another(tiny: Path) -> None:
    model, tokens = load_model(tiny), batch(0)
    with torch.no_grad():
        before = hidden_of(model, tokens).split(LENGTHS)
        for changed in range(len(LENGTHS)):
            other = [*tokens[:changed], batch(1)[changed], *tokens[changed + 1 :]]
            after = hidden_of(model, other).split(LENGTHS)
            for number, (old, new) in enumerate(zip(before, after, strict=True)):
                assert torch.equal(old, new) == (number != changed)


def compute_rank(rank: int, ranks: int, directory: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the positions of a rank's tokens in the row, their logits, and all ranks' gradients."""
    model = load_model(directory, context_parallel_size=ranks, use_distributed_optimizer=False)
    return compute_part(model, batch(0), rank, ranks, VOCAB)


def share_a_row(rank: int, directory: Path) -> None:
    config = make_config(context_parallel_size=2, use_distributed_optimizer=False)
    init_parallel(rank, 2, config, init_method=f"file://{directory}/store", local_rank=rank)
    torch.save(compute_rank(rank, 2, directory), directory / f"rank{rank}.pt")
    destroy_parallel()


def test_context_parallel_ranks_share_the_heads(tiny: Path) -> None:
    """Some sequences have one token, so that a rank has no token."""
    _, logits, gradients = compute_rank(0, 1, tiny)
    on_ranks(share_a_row, tiny, ranks=2)
    for rank in (0, 1):
        places, mine, summed = torch.load(tiny / f"rank{rank}.pt")
        torch.testing.assert_close(mine, logits[places], rtol=0, atol=1e-5)
        for name, gradient in summed.items():
            assert_gradients_equal(gradient, gradients[name], name)


@pytest.mark.parametrize(
    ("case", "shape", "kind", "functions", "weights"),
    [
        (
            "qwen3-next",
            {"linear_key_head_dim": 64, "linear_value_head_dim": 96},
            GatedDeltaNet,
            [PLAIN],
            ["conv_weight", "A_log", "dt_bias", "norm_weight"],
        ),
        (
            "nemotron-3",
            {"mamba_head_dim": 64, "ssm_state_size": 64},
            MambaMixer,
            [],
            ["conv_bias", "conv_weight", "dt_bias", "A_log", "D", "norm_weight"],
        ),
    ],
)
def test_the_plan_counts_what_the_backward_computes_again(
    tmp_path: Path,
    case: str,
    shape: dict[str, int],
    kind: type[nn.Module],
    functions: list[Any],
    weights: list[str],
) -> None:
    """A layer keeps its projected inputs only. The plan counts the peak of forward and backward between its
    projections."""
    tiny_checkpoint(tmp_path, CASES[case].kind, **CASES[case].shape | shape)
    model: Any = build_model(load_hf_config(tmp_path), make_config())
    layer: Any = next(module for module in model.modules() if isinstance(module, kind))
    layout, parameters = packed_layout(token_slice([512]), "cpu"), [getattr(layer, name) for name in weights]
    mixed = torch.rand(512, layer.sizes.keys * sum(layer.sizes.widths)).bfloat16().requires_grad_()
    saved: list[Tensor] = []

    def compute() -> Tensor:
        return keep_inputs(layer.mix, *functions, layout, mixed, *parameters)

    compute().sum().backward()  # the layout makes its tensors at the first use
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = compute()
    own = {x.data_ptr() for x in parameters}
    assert [x.data_ptr() for x in saved if x.data_ptr() not in own] == [mixed.data_ptr()]
    sizes = layer.sizes.attention(64)
    assert mixed[0].numel() + out[0].numel() <= sizes.kept
    peak = peak_bytes(lambda: compute().sum().backward(), tmp_path / "trace.json") / 4 / 512
    assert 0.95 < peak / sizes.scanned < 1.05
