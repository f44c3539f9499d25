"""Tests each pipeline stage's layers: by hand, as Megatron distributes them, and layouts that cannot be divided."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config.sections.megatron import MegatronConfig
from slime.plan.stages import Stages, build_stages, check_stages, expand, micro_batch_group

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
VIRTUAL, PER_STAGE = "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"


def section(ranks: int, **flags: Any) -> MegatronConfig:
    return MegatronConfig(pipeline_model_parallel_size=ranks, **flags)


@pytest.mark.parametrize(
    ("ranks", "flags", "layers", "counts"),
    [
        (1, {}, 36, [[36]]),
        (1, {PER_STAGE: 2}, 36, [[36]]),
        (4, {}, 36, [[9, 9, 9, 9]]),
        (2, {LAST: 16}, 36, [[20, 16]]),
        (4, {FIRST: 8, LAST: 8}, 36, [[8, 10, 10, 8]]),
        (2, {FIRST: 20, LAST: 16}, 36, [[20, 16]]),
        (2, {VIRTUAL: 2}, 8, [[2, 2], [2, 2]]),
        (2, {VIRTUAL: 1}, 8, [[4, 4]]),
        (2, {"virtual_pipeline_model_parallel_size": 4}, 8, [[1, 1]] * 4),
        (2, {PER_STAGE: 1}, 8, [[1, 1]] * 4),
        (4, {FIRST: 2, VIRTUAL: 2}, 14, [[1, 2, 2, 2]] * 2),
        (4, {EMBEDDING: True, LOSS: True}, 14, [[3, 4, 4, 3]]),
        (4, {LOSS: True}, 15, [[4, 4, 4, 3]]),
        (2, {EMBEDDING: True, LOSS: True, PER_STAGE: 1}, 6, [[0, 1], [1, 1], [1, 1], [1, 0]]),
        (2, {LAYOUT: "Et|t*3,L"}, 4, [[1, 3]]),
        (2, {LAYOUT: "E|tt|t|tL"}, 4, [[0, 2], [1, 1]]),
        (4, {LAYOUT: "Ett,(ttt|)*2,t|L"}, 9, [[5, 3, 1, 0]]),
    ],
)
def test_layers_of_stages(ranks: int, flags: dict[str, Any], layers: int, counts: list[list[int]]) -> None:
    stages = build_stages(section(ranks, **flags), layers)
    assert [list(of_virtual) for of_virtual in stages.counts] == counts
    assert sorted(i for rank in range(ranks) for i in stages.layers(rank)) == list(range(layers))


def test_the_layers_of_a_rank_with_virtual_stages() -> None:
    stages = Stages(((0, 2), (1, 1)))
    assert [stages.get_rank_layers(0), stages.get_rank_layers(1)] == [
        [range(0, 0), range(2, 3)],
        [range(0, 2), range(3, 4)],
    ]
    assert stages.layers(0) == [2] and stages.layers(1) == [0, 1, 3]
    assert stages.layout() == [["embedding"], ["decoder"] * 2, ["decoder"], ["decoder", "loss"]]


@pytest.mark.parametrize("text", ["Et|t*3,L", "E|tt|t|tL", "E,(tt|)*3,ttt|L", "(E)*1|(|t)*2|tL"])
def test_a_layout_is_read_as_megatron_reads_it(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert expand(text) == ["".join(letters[kind.name] for kind in stage) for stage in theirs]


def test_passes_in_flight_by_hand() -> None:
    """1F1B has 4, 3, 2, 1. The interleaved case has 2 ranks, 2 stages and groups of 2. Before its first backward, the
    first rank computes micro-batches 0 and 1 in its stage 0, both in its stage 1, and 2 in stage 0. The last rank
    does not wait for micro-batch 2."""
    assert [Stages(((1, 1, 1, 1),)).passes(rank, 1) for rank in range(4)] == [4, 3, 2, 1]
    interleaved = Stages(((1, 1), (1, 1)))
    assert [interleaved.passes(rank, 2) for rank in range(2)] == [5, 3]
    assert [interleaved.micro_batches(rank, 2) for rank in range(2)] == [3, 2]


def test_the_group_of_micro_batches() -> None:
    assert micro_batch_group(section(2), 8) == 1
    assert micro_batch_group(section(2, **{VIRTUAL: 2}), 8) == 2
    flags = {VIRTUAL: 2, "microbatch_group_size_per_virtual_pipeline_stage": 3}
    assert micro_batch_group(section(2, **flags), 8) == 3
    with pytest.raises(ValueError, match="must be at least --pipeline-model-parallel-size, got 3 and 4"):
        micro_batch_group(section(4, **flags), 8)


@pytest.mark.parametrize(
    ("ranks", "flags", "layers", "message"),
    [
        (5, {}, 36, "deal the model's layers out equally, got 5 stages for 36 layers; change"),
        (8, {}, 4, "got 8 stages for 4 layers"),
        (3, {LAST: 15}, 36, "got 3 stages for 36 layers, of which 15 on the last; change"),
        (2, {FIRST: 36}, 36, "got 2 stages for 36 layers, of which 36 on the first"),
        (2, {FIRST: 0}, 36, "got 2 stages for 36 layers, of which 0 on the first"),
        (2, {FIRST: 20, LAST: 20}, 36, "of which 20 on the first, 20 on the last"),
        (2, {VIRTUAL: 3}, 8, "must be a multiple of its 3 virtual stages, got 4 layers on rank 0 of 2"),
        (2, {VIRTUAL: 2, FIRST: 4}, 9, "got 5 layers on rank 1 of 2 (9 layers, of which 4 on the first)"),
        (2, {PER_STAGE: 3}, 8, "--num-layers-per-virtual-pipeline-stage must divide the layers of every"),
        (2, {PER_STAGE: 2, LAST: 2}, 8, "got 2 for 6, 2 layers; use --num-virtual-stages-per-pipeline-rank"),
        (2, {PER_STAGE: 2, VIRTUAL: 2}, 8, "must not be given together, got 2 and 2"),
        (2, {EMBEDDING: True}, 8, "got 2 stages for 8 + 1 = 9; change the number of stages"),
        (2, {LOSS: True, LAST: 2}, 9, "must be given without --decoder-last-pipeline-num-layers, got both"),
        (2, {LAYOUT: "Ett|ttL", LAST: 2}, 4, "must be given without --decoder-last-pipeline-num-layers"),
        (2, {LAYOUT: "Ett|t|tL"}, 4, "is a multiple of --pipeline-model-parallel-size 2, got Ett|t|tL (3 st"),
        (2, {LAYOUT: "Ett|tmL"}, 3, "must name only E (embedding), t (layer), L (loss), got Ett|tmL"),
        (2, {LAYOUT: "tt|EtL"}, 3, "must begin with E and end with L, each once, got tt|EtL"),
        (2, {LAYOUT: "Et*2|t*3L"}, 4, "model's 4 layers, got Et*2|t*3L = Ett|tttL (2 stages, 5 layers)"),
        (2, {LAYOUT: "Ett||tt|L"}, 4, "must have at least one letter per stage"),
        (2, {VIRTUAL: 2, "overrides": {"overlap_p2p_comm": False}}, 8, "--no-overlap-p2p-communication must"),
    ],
)
def test_stages_that_cannot_be(ranks: int, flags: dict[str, Any], layers: int, message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_stages(section(ranks, **flags), layers)
    assert message in str(error.value)
