"""Compares the micro-batch schedule with hand-made plans, and the packed rows with their samples."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slime.data.packing import build_dp_schedule, karmarkar_karp, pack
from slime.data.sharing.flops import prediction_flops
from slime.plan.flops import ForwardFlops, PredictionFlops

HF = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def shape_of(hf):
    """Returns a config for transformers, without the name of the class."""
    return {key: value for key, value in hf.items() if key != "model_type"}


SHAPE = shape_of(HF)


def args(**changes):
    defaults = dict(
        global_batch_size=None,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=10,
        context_parallel_size=1,
        pipeline_model_parallel_size=1,
        micro_batch_size=1,
        balance_data=False,
        balance_by_flops=False,
    )
    return SimpleNamespace(**{**defaults, **changes})


def test_flops_of_a_sample_by_hand():
    # A layer has these weights: attention 8*4*(2*2 + 2*1) = 192, MLP 3*8*16 = 384. Five tokens have 1+2+3+4+5 = 15
    # pairs. A pair costs 2*4 FLOPs twice in each of 2 heads. The head, 8*10, sees three response tokens.
    assert ForwardFlops(HF)(5, 3) == 2 * (2 * 576 * 5 + 15 * 2 * 2 * 2 * 4) + 2 * 80 * 3


def test_flops_of_a_sample_are_those_of_a_real_model():
    """PyTorch counts the FLOPs of transformers' Qwen3. Its eager attention computes the whole square, so the pairs
    with later tokens are subtracted."""
    length, response = 12, 5
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, attn_implementation="eager"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64), logits_to_keep=response)
    in_vain = 2 * 2 * 2 * 2 * 4 * (length * (length - 1) // 2)  # layers, heads, products, 2 x head_dim, pairs
    assert counter.get_total_flops() - in_vain == ForwardFlops(HF)(length, response)


def test_flops_of_multi_token_prediction_by_hand():
    """Two layers like the decoder's run forward, and backward for inputs and weights. The head has no gradient for
    weights."""
    hf = HF | {"model_type": "mimo", "num_nextn_predict_layers": 2, "tie_word_embeddings": False}
    layer = 2 * (576 + 2 * 8 * 8) * 5 + 15 * 2 * 2 * 2 * 4
    assert PredictionFlops(hf)(5, 3) == 2 * (3 * layer + 2 * (2 * 80 * 3))
    assert PredictionFlops(hf | {"num_nextn_predict_layers": 0})(5, 3) == 0
    data = {"micro_batch_indices": [[1], [0]], "total_lengths": [5, 7], "response_lengths": [3, 2]}
    assert prediction_flops(data, hf) == PredictionFlops(hf)(5, 3) + PredictionFlops(hf)(7, 2)


def test_a_window_has_fewer_pairs():
    """A token sees at most 3: 1 + 2 + 3 + 3 + 3 = 12 of 15 pairs in each of 2 layers and heads, two products of 2*4."""
    windowed = HF | {"model_type": "mistral", "sliding_window": 3}
    assert ForwardFlops(HF)(5, 3) - ForwardFlops(windowed)(5, 3) == 3 * 2 * 2 * 2 * 2 * 4
    assert ForwardFlops(HF)(3, 3) == ForwardFlops(windowed)(3, 3)


def test_flops_of_experts_are_those_a_token_goes_to():
    """Three layers, the last without experts, are compared with PyTorch's count for transformers' Qwen3-MoE."""
    length, response = 12, 5
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
    }
    hf = HF | experts | {"num_hidden_layers": 3, "mlp_only_layers": [2]}
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape_of(hf), **settings))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64), logits_to_keep=response)
    in_vain = 3 * 2 * 2 * 2 * 4 * (length * (length - 1) // 2)
    assert counter.get_total_flops() - in_vain == ForwardFlops(hf)(length, response)
    # Qwen's name of the field and transformers' name give the same number.
    renamed = {k: v for k, v in hf.items() if k != "num_experts"} | {"num_local_experts": 7}
    assert ForwardFlops(renamed)(length, response) == ForwardFlops(hf)(length, response)


def test_flops_of_shared_experts_are_counted():
    """The model has a dense layer, then two with experts and a shared expert that is twice as wide. The reference is
    PyTorch's count for transformers' GLM."""
    length, response = 12, 5
    experts = {
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 6,
        "n_shared_experts": 2,
        "model_type": "glm4_moe",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }
    hf = HF | experts | {"num_hidden_layers": 3, "first_k_dense_replace": 1}
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape_of(hf), **settings))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64), logits_to_keep=response)
    in_vain = 3 * 2 * 2 * 2 * 4 * (length * (length - 1) // 2)
    assert counter.get_total_flops() - in_vain == ForwardFlops(hf)(length, response)


def test_first_fit_then_stride():
    schedule = build_dp_schedule(args(), [6, 5, 4, 5], [0, 1, 2, 3], 1, HF)
    # First fit under 10: 6+4, 5+5.
    assert schedule.ranks == [[[[0, 2], [1, 3]]]]
    assert schedule.global_batch_sizes == [4]


def test_bins_are_split_until_ranks_get_the_same_number():
    schedule = build_dp_schedule(args(max_tokens_per_gpu=100), [6, 5, 4], [0, 1, 2], 2, HF)
    # One bin of 15 tokens becomes two; 6 | 5+4 has the smallest difference.
    assert sorted(schedule.ranks[0][0][0] + schedule.ranks[1][0][0]) == [0, 1, 2]
    assert {tuple(schedule.ranks[0][0][0]), tuple(schedule.ranks[1][0][0])} == {(0,), (1, 2)}


def test_oversized_sample_gets_its_own_bin():
    schedule = build_dp_schedule(args(), [50, 3, 4], [0, 1, 2], 1, HF)
    assert schedule.ranks == [[[[0], [1, 2]]]]


def test_steps_count_rollouts_keep_siblings_and_drop_the_rest():
    schedule = build_dp_schedule(args(global_batch_size=2), [1] * 6, [0, 0, 1, 2, 3, 4], 1, HF)
    assert schedule.step_samples == [[0, 1, 2], [3, 4]]
    assert schedule.global_batch_sizes == [2, 2]


def test_static_micro_batches():
    schedule = build_dp_schedule(
        args(use_dynamic_batch_size=False, micro_batch_size=2), [1] * 8, range(8), 2, HF
    )
    assert schedule.ranks == [[[[0, 1], [4, 5]]], [[[2, 3], [6, 7]]]]
    with pytest.raises(ValueError, match=r"got 6 samples, 2 x 2"):
        build_dp_schedule(args(use_dynamic_batch_size=False, micro_batch_size=2), [1] * 6, range(6), 2, HF)


def test_balance_data_evens_out_work():
    lengths = [9, 9, 1, 1]
    schedule = build_dp_schedule(args(balance_data=True), lengths, range(4), 2, HF)
    tokens = [sum(lengths[i] for step in rank for b in step for i in b) for rank in schedule.ranks]
    assert tokens == [10, 10]


def test_balance_data_counts_the_head_where_it_works():
    """The samples are equally long. The head costs more than all layers, and two samples are almost only prompt."""
    large_head = {**HF, "vocab_size": 1000}
    lengths, responses = [10] * 4, [9, 1, 9, 1]
    schedule = build_dp_schedule(args(balance_data=True), lengths, range(4), 2, large_head, responses)
    work = [[responses[i] for step in rank for b in step for i in b] for rank in schedule.ranks]
    assert [sorted(each) for each in work] == [[1, 9], [1, 9]]


def test_balance_by_flops_ignores_the_cap_and_evens_out():
    lengths = [30, 2, 2, 2, 2, 2]
    schedule = build_dp_schedule(args(balance_by_flops=True, max_tokens_per_gpu=20), lengths, range(6), 2, HF)
    bins = [tuple(b) for rank in schedule.ranks for b in rank[0]]
    assert sorted(bins) == [(0,), (1, 2, 3, 4, 5)]


def test_too_few_samples_for_the_ranks():
    with pytest.raises(ValueError, match=r"must fill 4 data-parallel ranks equally, got 3"):
        build_dp_schedule(args(), [1, 1, 1], range(3), 4, HF)
    with pytest.raises(ValueError, match=r"--global-batch-size must not exceed .* got 8 with 3 rollouts"):
        build_dp_schedule(args(global_batch_size=8), [1, 1, 1], range(3), 1, HF)


def test_karmarkar_karp_known_instance():
    # 8,7,6,5,4 in two parts: the differencing method reaches 16 | 14.
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in p) for p in parts) == [14, 16]
    equal = karmarkar_karp([10, 1, 1, 10], 2, equal_size=True)
    assert sorted(map(tuple, equal)) == [(0, 1), (2, 3)] or sorted(map(tuple, equal)) == [(0, 2), (1, 3)]
    assert karmarkar_karp([], 2, equal_size=False) == [[], []]


def test_pack_points_every_response_token_at_the_state_before_it():
    data = {
        "tokens": [torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2, 3])],
        "response_lengths": [2, 1],
        "loss_masks": [torch.tensor([1, 0]), torch.tensor([1])],
    }
    batch = pack(data, [1, 0], ["loss_masks"], multiple=4, device="cpu")
    assert batch.tokens.tolist() == [1, 2, 3, 5, 6, 7, 8, 0]
    assert batch.part.lengths == (3, 4) and batch.mine is None
    assert batch.rows.tolist() == [1, 4, 5]
    assert batch.targets.tolist() == [3, 7, 8]
    assert batch.sample_of_row.tolist() == [0, 1, 1]
    assert batch.columns["loss_masks"].tolist() == [1, 1, 0]
    assert [t.tolist() for t in batch.split(torch.tensor([1.0, 2.0, 3.0]), [2, 1])] == [[1.0], [2.0, 3.0]]


def test_virtual_stages_want_whole_groups_of_micro_batches():
    """With two data-parallel ranks and groups of two, four micro-batches are needed, though three would hold the
    tokens."""
    virtual = dict(
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="E|t|t|L",
        microbatch_group_size_per_virtual_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        num_virtual_stages_per_pipeline_rank=None,
        virtual_pipeline_model_parallel_size=None,
        num_layers_per_virtual_pipeline_stage=None,
    )
    schedule = build_dp_schedule(args(**virtual), [5, 5, 5, 5, 5], [0, 1, 2, 3, 4], 2, HF)
    assert [len(step) for rank in schedule.ranks for step in rank] == [2, 2]
    assert sorted(i for rank in schedule.ranks for step in rank for b in step for i in b) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"ranks equally in groups of 2 micro-batches .*, got 3; raise"):
        build_dp_schedule(args(**virtual), [5, 5, 5], [0, 1, 2], 2, HF)
    fixed = args(**virtual, use_dynamic_batch_size=False)
    with pytest.raises(ValueError, match=r"virtual stage, got 6 samples, 1 x 2 x 2; change the sizes"):
        build_dp_schedule(fixed, [5] * 6, list(range(6)), 2, HF)
    balanced = build_dp_schedule(args(**virtual, balance_by_flops=True), [5] * 5, list(range(5)), 2, HF)
    assert [len(step) for rank in balanced.ranks for step in rank] == [2, 2]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"global_batch_size": 4, "variable_global_batch_size": True}, [4, 2]),
        ({"global_batch_size": 3, "variable_global_batch_size": True}, [3, 3]),
        ({"global_batch_size": 9, "variable_global_batch_size": True}, [6]),
        ({"global_batch_size": 4, "global_batch_size_schedule": [1, 2, 3]}, [1, 2, 3]),
        ({"global_batch_size": 4, "global_batch_size_schedule": [6]}, [6]),
    ],
)
def test_steps_of_several_sizes_cover_every_rollout(flags, wanted):
    """Sizes count rollouts: rollout 0 has two samples, which stay in one step."""
    schedule = build_dp_schedule(args(**flags), [1] * 7, [0, 0, 1, 2, 3, 4, 5], 1, HF)
    assert schedule.global_batch_sizes == wanted
    assert sorted(i for step in schedule.step_samples for i in step) == list(range(7))
    assert schedule.step_samples[0][:2] == [0, 1]


def test_a_schedule_must_cover_the_batch():
    flags = {"global_batch_size": 4, "global_batch_size_schedule": [2, 3]}
    with pytest.raises(
        ValueError, match="--global-batch-size-schedule must cover .*, got 2,3 with 6 rollouts"
    ):
        build_dp_schedule(args(**flags), [1] * 6, range(6), 1, HF)
    with pytest.raises(ValueError, match="must fill 2 data-parallel ranks equally, got 1"):
        build_dp_schedule(
            args(global_batch_size=5, variable_global_batch_size=True), [1] * 6, range(6), 2, HF
        )
