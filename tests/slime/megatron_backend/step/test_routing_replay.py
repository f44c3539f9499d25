"""Tests replayed experts in a tiny Qwen3-MoE: its own choices change no bit, and other choices agree with plain
PyTorch."""

from __future__ import annotations

import pytest
import torch
from megatron_cases import (
    VOCAB,
    hf_gradients,
    hf_logits,
    loaded,
    sequences,
    sum_loss,
    tiny_checkpoint,
)
from torch.nn.functional import linear

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import gather_hidden, output_weight, stage_output, unwrap
from slime.megatron_backend.step.routing_replay import OPEN, Routing

pytestmark = pytest.mark.usefixtures("single_rank")

SHAPES = {
    "all-layers": {},
    "not-normalised": {"norm_topk_prob": False},
    "one-expert-a-token": {"norm_topk_prob": False, "num_experts_per_tok": 1},
    "first-layer-dense": {"mlp_only_layers": [0], "num_hidden_layers": 3},
    "glm": {
        "kind": "glm4_moe",
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "routed_scaling_factor": 1.5,
    },
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = 6


@pytest.fixture(params=SHAPES)
def checkpoint(request, tmp_path):
    return tmp_path, tiny_checkpoint(tmp_path, **{"kind": "qwen3_moe", **SHAPES[request.param]})


def logits_of(model, batch, routing=None):
    layout = packed_layout(token_slice([len(s) for s in batch]), "cpu")
    layout.routing = routing
    return (gather_hidden(model, stage_output(model, torch.cat(batch), layout)) @ output_weight(model).T)[
        :, :VOCAB
    ]


def step(model, batch, routing=None):
    """Returns logits, and every parameter's gradient."""
    model.zero_grad_buffer()
    logits = logits_of(model, batch, routing)
    sum_loss(logits, batch).backward()
    return logits.detach(), model.buffers[0].grad_data.clone()


def random_ids(rows, layers, topk, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, layers, EXPERTS, generator=generator).topk(topk).indices.to(torch.int16)


def shape_of(model):
    core = unwrap(model).config
    return core.num_layers, core.moe_router_topk


def own_ids(model, batch):
    routing = Routing(records=True)
    with torch.no_grad():
        logits_of(model, batch, routing)
    layers, topk = shape_of(model)
    ids = torch.zeros(sum(map(len, batch)), layers, topk, dtype=torch.int16)
    for layer, chosen in routing.chosen.items():
        ids[:, layer] = chosen
    return ids


@pytest.mark.parametrize("recompute", [{}, RECOMPUTE])
def test_replaying_its_own_choices_changes_no_bit(checkpoint, recompute):
    directory, _ = checkpoint
    model, batch = loaded(directory, overrides=recompute), sequences(1)
    plain = step(model, batch)
    ids = own_ids(model, batch)
    for compared in (ids, ids.flip(-1)):  # in any order of the engine's ids
        routing = Routing(compared)
        assert all(torch.equal(a, b) for a, b in zip(step(model, batch, routing), plain, strict=True))
        assert {int(x) for x in routing.differing.values()} == {0}
        assert all(int(x) == len(ids) for x in routing.compared.values())
    open_ = step(model, batch, Routing(torch.full_like(ids, OPEN)))
    assert all(torch.equal(a, b) for a, b in zip(open_, plain, strict=True))


def replaying(hf, ids, first):
    """Makes transformers' routers use `ids` [T, L, K] from row `first` on instead of their top k."""
    handles = []
    for number, layer in enumerate(hf.model.layers):
        gate = getattr(layer.mlp, "gate", None)
        if gate is None or not hasattr(gate, "top_k"):
            continue

        def forward(module, inputs, output, number=number):
            (hidden,) = inputs
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits, glm = linear(hidden, module.weight).float(), hasattr(module, "e_score_correction_bias")
            probabilities = logits.sigmoid() if glm else logits.softmax(-1)
            mine = ids[first : first + len(hidden), number].long()
            weights = probabilities.gather(1, mine)  # the bias takes part in the choice, not in the weight
            if module.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return output[0], weights * (module.routed_scaling_factor if glm else 1), mine

        handles.append(gate.register_forward_hook(forward))
    return handles


def test_other_choices_give_what_plain_pytorch_gives(checkpoint, tmp_path):
    """The test compares logits and every gradient, including the routers'."""
    directory, hf = checkpoint
    model, batch = loaded(directory), sequences(2)
    ids = random_ids(sum(map(len, batch)), *shape_of(model))
    logits, _ = step(model, batch, Routing(ids))
    rows, first = [], 0
    for tokens in batch:
        handles = replaying(hf, ids, first)
        rows.append(hf(tokens[None]).logits[0])
        for handle in handles:
            handle.remove()
        first += len(tokens)
    wanted = torch.cat(rows)
    torch.testing.assert_close(logits, wanted.detach(), rtol=0, atol=1e-5)
    assert (logits - hf_logits(hf, batch)).abs().max() > 1e-2
    sum_loss(wanted, batch).backward()
    gradients = hf_gradients(hf, tmp_path / "gradients")
    for parameter in unwrap(model).parameters():
        parameter.data = parameter.main_grad  # the export then lists gradients
    for name, gradient in export_hf(model):
        if name.endswith(".e_score_correction_bias"):  # a buffer, which is frozen
            continue
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_open_rows_are_the_routers_own_and_are_not_counted(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3_moe")
    model, batch = loaded(tmp_path), sequences(3)
    mine, random = own_ids(model, batch), random_ids(29, *shape_of(model))
    mixed = mine.clone()
    mixed[:9] = random[:9]
    mixed[20:] = OPEN
    routing = Routing(mixed)
    step(model, batch, routing)
    assert {layer: int(x) for layer, x in routing.compared.items()} == {0: 20, 1: 20}
    apart = (mine[:20, 0].sort(-1).values != mixed[:20, 0].sort(-1).values).any(-1).sum()
    assert 0 < int(routing.differing[0]) == int(apart) <= 9


def test_a_layer_that_is_computed_again_has_its_own_micro_batch(tmp_path):
    """Two micro-batches go forward before the first goes backward, as in a pipeline."""
    tiny_checkpoint(tmp_path, "qwen3_moe")
    found = []
    for overrides in ({}, RECOMPUTE):
        model = loaded(tmp_path, overrides=overrides)
        model.zero_grad_buffer()
        batches = [sequences(4), sequences(5)]
        routings = [Routing(random_ids(29, *shape_of(model), seed)) for seed in (1, 2)]
        losses = [sum_loss(logits_of(model, b, r), b) for b, r in zip(batches, routings, strict=True)]
        for loss in losses:
            loss.backward()
        found.append(model.buffers[0].grad_data.clone())
    assert torch.equal(found[0], found[1])
    # The test can see the difference: with the second's experts in both, the gradients differ.
    model.zero_grad_buffer()
    for batch in batches:
        sum_loss(logits_of(model, batch, routings[1]), batch).backward()
    assert not torch.allclose(model.buffers[0].grad_data, found[0], atol=1e-4)


def test_rows_of_another_micro_batch_are_refused(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3_moe")
    model = loaded(tmp_path)
    with pytest.raises(ValueError, match="routed experts must have 29 rows, got 28"):
        logits_of(model, sequences(1), Routing(random_ids(28, *shape_of(model))))
