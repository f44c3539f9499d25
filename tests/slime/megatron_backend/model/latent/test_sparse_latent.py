"""Sparse latent attention: the selection of the indexer against a formula per query, dense attention for short
sequences, parts of queries, shared selections, recomputation, ranks, and the sizes of published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import (
    become_gradients,
    hf_logits,
    make_config,
    packed_logits,
    sequences,
    sum_loss,
    tiny_checkpoint,
)
from megatron_cases import loaded as loaded_model
from published_sizes import DEEPSEEK, GLM5, V32
from rank_processes import on_ranks
from torch import Tensor

from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.weights import export_hf
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import stage_output, unwrap
from slime.megatron_backend.model.latent import selection
from slime.megatron_backend.model.latent.selection import LightningIndexer
from slime.megatron_backend.model.model_config import transformer_config
from slime.megatron_backend.model.optimizer import build_optimizer, finish_grads
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import read_decoder
from slime.models.latent import INDEXER
from slime.models.selection import Selection
from slime.plan.flops import ForwardFlops
from slime.plan.model_shape import Params, Shape
from slime.plan.trained_params import trained_params
from slime.rules.heads import indexer_notes

BATCH = sequences(3)
SHARED: dict[str, Any] = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture
def single_rank(tmp_path):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/store")
    yield
    destroy_parallel()


def tiny(tmp_path: Path, kind: str = "glm_moe_dsa", **shape: Any) -> Any:
    hf = tiny_checkpoint(tmp_path / "hf", kind, **shape)
    return hf, loaded_model(tmp_path / "hf")


def indexers(model: Any) -> list[LightningIndexer]:
    return [module for module in unwrap(model).modules() if isinstance(module, LightningIndexer)]


def test_the_indexer_selects_what_its_formula_scores_highest(tmp_path, single_rank):
    """The formula of 2512.02556, part 2.1, for one query and one key at a time."""
    _, model = tiny(tmp_path)
    first = indexers(model)[0]
    sizes, generator = first.sizes, torch.Generator().manual_seed(4)
    hidden, latent = (torch.randn(29, 1, width, generator=generator) for width in (64, 24))
    layout = packed_layout(token_slice([len(x) for x in BATCH]), "cpu")
    layout.rotary = unwrap(model).rotary(layout.positions)
    found = first(hidden, latent, layout)
    cos, sin = layout.rotary[0][:2]

    def turn(x: Tensor, at: int) -> Tensor:
        even, odd = x[..., :8:2], x[..., 1:8:2]
        return torch.cat((even * cos[at] - odd * sin[at], odd * cos[at] + even * sin[at], x[..., 8:]), dim=-1)

    start, checked = 0, 0
    for length in map(len, BATCH):
        row = slice(start, start + length)
        keys = [turn(first.k_norm(first.wk(hidden[at])), at) for at in range(start, start + length)]
        for query in range(length):
            at = start + query
            q = turn(first.wq_b(latent[at]).view(sizes.heads, sizes.size), at)
            w = first.weights_proj(hidden[at])[0] / (sizes.heads * sizes.size) ** 0.5
            scores = torch.stack([(w * (q @ key[0]).relu()).sum() for key in keys[: query + 1]])
            wanted = set(scores.topk(min(sizes.topk, query + 1)).indices.tolist())
            assert selected(layout, found, row, query) == wanted
            checked += len(wanted) < query + 1
        start += length
    assert checked == 1 + 5 + 8  # the queries with more than four keys


def selected(layout: Any, found: list[Tensor | None], row: slice, query: int) -> set[int]:
    """The keys that the query of a sequence sees, from the padded batches."""
    slot = int(layout.query_slots[row.start + query])
    for bucket, chosen in zip(layout.buckets, found, strict=True):
        if slot < bucket.runs * bucket.queries:
            if chosen is None:
                return set(range(query + 1))
            mine = chosen[slot // bucket.queries, slot % bucket.queries].tolist()
            return {key for key in mine if key <= query}
        slot -= bucket.runs * bucket.queries
    raise AssertionError(query)


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_short_sequences_have_dense_attention(tmp_path, single_rank, monkeypatch, kind):
    """With 12 selected tokens, every token of the sequences of at most 12 sees all tokens. The indexer does not run,
    and its weights change nothing."""
    hf, model = tiny(tmp_path, kind, index_topk=12)
    monkeypatch.setattr(LightningIndexer, "forward", None)
    dense = packed_logits(model, BATCH)
    torch.testing.assert_close(dense, hf_logits(hf, BATCH), rtol=0, atol=1e-5)
    with torch.no_grad():
        for layer in hf.model.layers:
            for parameter in layer.self_attn.indexer.parameters():
                parameter.normal_()
    torch.testing.assert_close(hf_logits(hf, BATCH), dense, rtol=0, atol=1e-5)


def test_selected_attention_to_all_tokens_is_dense_attention(tmp_path, single_rank):
    """With 11 selected tokens, only the last query of the longest sequence sees fewer tokens than before."""
    _, model = tiny(tmp_path, index_topk=11)
    (tmp_path / "dense").mkdir()
    _, dense = tiny(tmp_path / "dense", index_topk=12)
    with torch.no_grad():
        difference = (packed_logits(model, BATCH) - packed_logits(dense, BATCH)).abs().amax(-1)
    assert difference[:-1].max() < 1e-6 < 1e-4 < difference[-1]


def test_parts_of_queries_change_nothing(tmp_path, single_rank, monkeypatch):
    _, model = tiny(tmp_path)
    with torch.no_grad():
        whole = packed_logits(model, BATCH)
        monkeypatch.setattr(selection, "MOST_SCORES", 12 * 16 * 5)  # five queries of the indexer at a time
        torch.testing.assert_close(packed_logits(model, BATCH), whole, rtol=0, atol=1e-6)


def test_shared_layers_recompute_with_the_selection_of_their_own_source(tmp_path, single_rank):
    tiny_checkpoint(tmp_path / "hf", "glm_moe_dsa", **SHARED)
    found = []
    for overrides in ({}, FULL):
        model = loaded_model(tmp_path / "hf", overrides=overrides)
        unwrap(model).train()
        packed_logits(model, BATCH).square().mean().backward()
        become_gradients(model)
        found.append([x.clone() for x in unwrap(model).parameters()])
        assert len(indexers(model)) == 2
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_published_files_may_have_indexers_in_shared_layers(tmp_path, single_rank):
    from safetensors.torch import load_file, save_file

    hf = tiny_checkpoint(tmp_path / "hf", "glm_moe_dsa", **SHARED)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    own = {name: x for name, x in tensors.items() if ".layers.0.self_attn.indexer." in name}
    assert len(own) == 5
    save_file(tensors | {n.replace(".0.", ".1.", 1): x.clone() for n, x in own.items()}, file)
    model = loaded_model(tmp_path / "hf")
    torch.testing.assert_close(packed_logits(model, BATCH), hf_logits(hf, BATCH), rtol=0, atol=1e-5)
    assert dict(export_hf(model)).keys() == tensors.keys()
    save_file({name: x for name, x in tensors.items() if name not in own}, file)
    with pytest.raises(ValueError, match=r"5 missing from .*: model.layers.0.self_attn.indexer.k_norm.bias"):
        loaded_model(tmp_path / "hf")


def test_the_indexer_is_frozen(tmp_path, single_rank):
    """An optimizer step with weight decay changes all parameters except the indexers'."""
    _, model = tiny(tmp_path)
    optimizer, _ = build_optimizer(model, make_config(lr=1e-3, weight_decay=0.1), total_steps=10)
    before = {name: x.detach().clone() for name, x in unwrap(model).named_parameters()}
    sum_loss(packed_logits(model, BATCH), BATCH).backward()
    finish_grads(model)
    optimizer.step()
    same = {name for name, x in unwrap(model).named_parameters() if torch.equal(x, before[name])}
    frozen = {name for name in before if INDEXER in name}
    assert len(frozen) == 2 * 5 and frozen <= same
    assert not any(hasattr(unwrap(model).get_parameter(name), "main_grad") for name in frozen)
    held = {id(x) for group in optimizer.param_groups for x in group["params"]}
    assert not held & {id(unwrap(model).get_parameter(name)) for name in frozen}
    # experts without a token keep their weights too
    assert all("experts" in name for name in same - frozen if not name.endswith("expert_bias"))


def of_a_rank(rank: int, root: Path) -> None:
    config = make_config(context_parallel_size=2, use_distributed_optimizer=False)
    info = init_parallel(rank, 2, config, init_method=f"file://{root}/store", local_rank=rank)
    model = loaded_model(root / "hf", context_parallel_size=2, use_distributed_optimizer=False)
    part = token_slice([len(x) for x in BATCH], rank=rank, size=2)
    row = torch.zeros(part.rows, dtype=torch.int64)
    row[: len(part.tokens)] = torch.cat(BATCH)[part.tokens]
    output = stage_output(model, row, packed_layout(part, "cpu", info.cp_group))[: len(part.tokens), 0]
    (output.square().sum() / 29).backward()
    finish_grads(model)
    become_gradients(model)
    torch.save((part.tokens, output.detach(), dict(export_hf(model))), root / f"rank{rank}.pt")
    destroy_parallel()


def test_context_parallelism_selects_the_same_tokens(tmp_path):
    """Two ranks that share every sequence have the hidden states and gradients of a single rank."""
    tiny_checkpoint(tmp_path / "hf", "glm_moe_dsa", **SHARED)
    on_ranks(of_a_rank, tmp_path, ranks=2)
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path}/one")
    try:
        model = loaded_model(tmp_path / "hf")
        whole = token_slice([len(x) for x in BATCH])
        expected = stage_output(model, torch.cat(BATCH), packed_layout(whole, "cpu"))[:, 0]
        (expected.square().sum() / 29).backward()
        become_gradients(model)
        wanted = dict(export_hf(model))
    finally:
        destroy_parallel()
    for rank in (0, 1):
        tokens, output, gradients = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(output, expected.detach()[tokens], rtol=0, atol=1e-5)
        for name in wanted.keys() - {"lm_head.weight"}:
            torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-4, atol=1e-5)


def test_the_published_models_are_read():
    shape = Shape.of(GLM5)
    # The model card has 744 B parameters. The layer of multi-token prediction is not part of this number.
    assert shape.params == pytest.approx(744e9, rel=1e-3)
    own = 2048 * 32 * 128 + 6144 * (128 + 32)
    assert shape.kinds[0].attention.frozen == own == 9371648
    assert shape.cache == 78 * (512 + 64 + 66)  # the indexer's key: 128 values of fp8 and a scale in fp32
    selection_of_run = Selection(indexer=False)
    assert trained_params(selection_of_run, shape, range(78), ()) + Params(whole=78 * own) == trained_params(
        Selection(), shape, range(78), ()
    )
    assert Shape.of(V32).params - Shape.of(DEEPSEEK).params == 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    # From 2048 tokens on, a further token sees 2048 others
    long, longer = (ForwardFlops(V32)(length, 0) for length in (4096, 4097))
    fixed = ForwardFlops(V32)(1, 0) - 61 * 2 * 128 * (192 + 128)
    assert longer - long - fixed == 61 * 2 * 128 * (192 + 128) * 2048


def test_layers_share_selections_as_config_json_states():
    sources = {
        (0, 0, 2, 2): {"indexer_types": ["full", "shared", "full", "shared"]},
        (0, 1, 1, 3): {"index_topk_pattern": "FFSF"},
        (0, 1, 2, 2): {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        (None, None, None, None): {},
    }
    for wanted, fields in sources.items():
        layers = read_decoder(GLM5 | {"num_hidden_layers": 4} | fields).layers
        assert tuple(layer.attention.index.source for layer in layers) == wanted
        shared = [source not in (None, number) for number, source in enumerate(wanted)]
        assert [layer.attention.index.shared for layer in layers] == shared
        assert [not layer.attention.frozen for layer in layers] == shared
    last = read_decoder(GLM5 | SHARED).predictions[0].attention
    assert last.frozen and not last.index.shared and last.cache == 642


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": None}, "must give index_topk"),
        ({"q_lora_rank": None}, "must give q_lora_rank"),
        ({"index_head_dim": 32}, "index_head_dim in config.json must be at least 64, .* got 32 and 2048"),
        (
            {"indexer_rope_interleave": False},
            "indexer_rope_interleave in config.json must be True, got False",
        ),
        ({"indexer_types": ["full"]}, "for each of the 78 layers, got"),
        ({"indexer_types": ["shared"] * 78}, "must be full for the first layer, got shared"),
    ],
)
def test_what_is_not_computed_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        read_decoder(GLM5 | change)


def test_a_stage_may_not_begin_with_a_shared_selection():
    config = make_config(pipeline_model_parallel_size=2)
    transformer_config(GLM5 | SHARED | {"num_nextn_predict_layers": 0}, config)
    types = {"indexer_types": ["full", "full", "shared", "shared"]}
    with pytest.raises(
        ValueError, match="layer with its own indexer|layer 2, which uses the indexer of layer 1"
    ):
        transformer_config(GLM5 | SHARED | types, config)


def test_ranks_do_not_exchange_heads_of_sparse_attention():
    ranks = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "context_parallel_size": 2}
    for hf, wanted in ((GLM5, "all_gather"), (DEEPSEEK, "a2a")):
        hf = hf | {"num_nextn_predict_layers": 0}
        assert transformer_config(hf, make_config(**ranks)).cp_comm_type == wanted
    with pytest.raises(
        ValueError, match="--cp-comm-type must be all_gather for a model with an indexer, .* got a2a"
    ):
        transformer_config(GLM5, make_config(**ranks, cp_comm_type="a2a"))


def test_a_run_without_freeze_indexer_has_a_note():
    decoder = read_decoder(GLM5)
    (note,) = indexer_notes(make_config(), decoder)
    assert note == (
        "the indexers of sparse attention keep their weights, as with --freeze-indexer: the loss has no gradient for "
        "the choice of tokens, and this version has no loss that trains indexers"
    )
    assert not list(indexer_notes(make_config(freeze_indexer=True), decoder))
    dense = read_decoder(DEEPSEEK)
    assert not list(indexer_notes(make_config(), dense))
    assert list(indexer_notes(make_config(freeze_indexer=True), dense)) == [
        "--freeze-indexer has no effect: the model has no indexer"
    ]
