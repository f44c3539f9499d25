"""Tests the experts and rows that a rank of an engine compares. Real engines: tests/e2e, tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vime.vllm.worker.live_experts import list_remote_experts, local_experts
from vime.vllm.worker.live_weights import DecayRates, differing_tensors

PATH = "model.layers.0.mlp.experts.routed_experts"


def layer(expert_map: list[int] | None, *, gated: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        expert_map=None if expert_map is None else torch.tensor(expert_map),
        moe_config=SimpleNamespace(is_act_and_mul=gated),
    )


def test_a_rank_has_the_experts_of_its_map() -> None:
    assert local_experts(layer(None), 4) == [0, 1, 2, 3]
    assert local_experts(layer([-1, -1, 0, 1]), 2) == [2, 3]
    assert local_experts(layer([-1, 1, -1, 0]), 2) == [3, 1]  # in the order of its parameters


def test_the_ranks_of_an_engine_compare_every_expert_once() -> None:
    """vLLM distributes experts in runs or in turn. In both cases, the other ranks have the experts that a
    rank lacks."""
    update = {f"model.layers.0.mlp.experts.{e}.w1.weight" for e in range(4)}
    for maps in ([[0, 1, -1, -1], [-1, -1, 0, 1]], [[0, -1, 1, -1], [-1, 0, -1, 1]]):
        own = [local_experts(layer(of_rank), 2) for of_rank in maps]
        assert sorted(own[0] + own[1]) == [0, 1, 2, 3]
        for of_rank, others in zip(maps, reversed(own), strict=True):
            elsewhere = list(list_remote_experts(PATH, layer(of_rank), update))
            assert elsewhere == [
                f"model.layers.0.mlp.experts.{e}.{name}.weight" for e in others for name in ("w1", "w3", "w2")
            ]
    assert list(list_remote_experts(PATH, layer(None), update)) == []


@pytest.mark.parametrize(("tp", "experts"), [((0, 1), None), ((1, 2), None), ((0, 1), [-1, 0, -1, 1])])
@pytest.mark.parametrize(
    "names", [("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")]
)
def test_experts_with_and_without_a_gate(
    tp: tuple[int, int], experts: list[int] | None, names: tuple[str, ...]
) -> None:
    """Experts of Nemotron 3 have no gate. Their widths are padded here, as some kernels need it."""
    rank, ranks = tp
    first, down = names[:-1], names[-1]
    parent = PATH.removesuffix(".routed_experts")
    update = {f"{parent}.{e}.{name}.weight": torch.randn(8, 3) for e in range(4) for name in first}
    update |= {f"{parent}.{e}.{down}.weight": torch.randn(3, 8) for e in range(4)}
    own = local_experts(layer(experts), 4 if experts is None else 2)

    def rows(expert: int) -> torch.Tensor:
        parts = (update[f"{parent}.{expert}.{name}.weight"].chunk(ranks)[rank] for name in first)
        return torch.cat([nn.functional.pad(part, (0, 0, 0, 2)) for part in parts])

    routed = nn.Module()
    routed.w13_weight = nn.Parameter(torch.stack([rows(expert) for expert in own]))
    columns = [update[f"{parent}.{expert}.{down}.weight"].chunk(ranks, 1)[rank] for expert in own]
    routed.w2_weight = nn.Parameter(nn.functional.pad(torch.stack(columns), (0, 2)))
    vars(routed).update(vars(layer(experts, gated=len(first) == 2)))
    routed.moe_config.intermediate_size_per_partition = 8 // ranks
    routed.moe_config.moe_parallel_config = SimpleNamespace(tp_rank=rank, tp_size=ranks)
    routed.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="TRITON"))
    model = nn.Module()
    model.add_module("model", nn.Module())
    model.model.layers = nn.ModuleList([nn.Module()])
    model.model.layers[0].mlp = nn.Module()
    model.model.layers[0].mlp.experts = nn.Module()
    model.model.layers[0].mlp.experts.routed_experts = routed
    assert differing_tensors(model, update, update.__getitem__) == []
    for name in names:
        changed = f"{parent}.{own[-1]}.{name}.weight"
        other = {**update, changed: update[changed] + 1}
        assert differing_tensors(model, other, other.__getitem__) == [changed]


class _Exp(TorchFunctionMode):
    """Records the devices on which exponentials are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.exp, torch.Tensor.exp):
            self.devices.add(found.device.type)
        return found


@pytest.mark.parametrize("rank", [0, 1])
def test_rates_are_computed_where_the_layer_is(rank: int) -> None:
    """vLLM's loader computes a Mamba-2 layer's rates on the layer's device, while a file's tensors are on the CPU. The
    exponentials of two devices differ in the last bit. The device `meta` stands for a GPU, and has no values."""
    logs = torch.randn(8)
    mixer = nn.Module()
    mixer.A = nn.Parameter(-logs.chunk(2)[rank].exp())
    vars(mixer).update(tp_rank=rank, tp_size=2)
    torch.testing.assert_close(DecayRates(mixer).piece(logs), mixer.A.data, rtol=0, atol=0)
    assert not torch.equal(DecayRates(mixer).piece(logs + 1), mixer.A)
    mixer.A = nn.Parameter(mixer.A.to("meta"))
    with _Exp() as seen:
        assert DecayRates(mixer).piece(logs.bfloat16()).shape == (4,)
    assert seen.devices == {"meta"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_of_files_that_is_several_projections_of_vllm(rank: int) -> None:
    """Qwen3.5 runs on two ranks. Its files have q, k and v in one tensor, and z in another. vLLM has all four in one
    matrix."""
    q, k, v, z = (torch.randn(rows, 3) for rows in (4, 4, 8, 8))
    module = nn.Module()
    module.in_proj_qkvz = nn.Module()
    mine = torch.cat([x.chunk(2)[rank] for x in (q, k, v, z)])
    module.in_proj_qkvz.weight = nn.Parameter(mine)
    module.packed_modules_mapping = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}
    vars(module.in_proj_qkvz).update(output_partition_sizes=[2, 2, 4, 4], tp_rank=rank, tp_size=2)
    update = {"in_proj_qkv.weight": torch.cat([q, k, v]), "in_proj_z.weight": z}
    assert differing_tensors(module, update, update.__getitem__) == []
    update["in_proj_qkv.weight"][4 + 2 * rank] += 1  # a key of this rank
    assert differing_tensors(module, update, update.__getitem__) == ["in_proj_qkv.weight"]


@pytest.mark.parametrize(("tp", "experts"), [((0, 1), None), ((1, 2), None), ((0, 1), [-1, 0, -1, 1])])
def test_stacked_experts_are_compared_on_each_rank(tp: tuple[int, int], experts: list[int] | None) -> None:
    """Files of Qwen3-VL have all experts of a layer in two tensors [E, inputs, outputs]. A rank of an engine has a part
    of each expert, or some of the experts."""
    rank, ranks = tp
    update = {
        "mlp.experts.gate_up_proj": torch.randn(4, 3, 16),
        "mlp.experts.down_proj": torch.randn(4, 8, 3),
    }
    gate_up, down = update.values()
    gate, up = (part.chunk(ranks, 2)[rank] for part in gate_up.chunk(2, 2))
    own = [number for number, index in enumerate(experts or range(4)) if index >= 0]
    module = nn.Module()
    module.mlp = nn.Module()
    module.mlp.experts = nn.Module()
    layer_of = module.mlp.experts.routed_experts = nn.Module()
    layer_of.w13_weight = nn.Parameter(torch.cat([gate, up], 2).transpose(1, 2)[own])
    layer_of.w2_weight = nn.Parameter(down.chunk(ranks, 1)[rank].transpose(1, 2)[own])
    parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks)
    layer_of.moe_config = SimpleNamespace(
        intermediate_size_per_partition=8 // ranks, moe_parallel_config=parallel, is_act_and_mul=True
    )
    layer_of.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="TRITON"))
    layer_of.expert_map = None if experts is None else torch.tensor(experts)
    assert differing_tensors(module, update, update.__getitem__) == []
    update["mlp.experts.gate_up_proj"][own[-1], 2, 8 // ranks * (rank + 1) - 1] += 1
    assert differing_tensors(module, update, update.__getitem__) == ["mlp.experts.gate_up_proj"]
