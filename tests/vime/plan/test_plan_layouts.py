"""Plans of pipelines with virtual stages, of engines that spread experts, and of a critic on separate GPUs."""

from __future__ import annotations

import json

import pytest
from architectures import ARCHITECTURES

from slime.plan.model_shape import Shape
from vime.backends import parse_config
from vime.plan.command import describe
from vime.vllm.memory import engine_memory

QWEN3_4B = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}


def test_plan_shows_the_layers_of_a_pipeline(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"num_hidden_layers": 12}))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    base = (
        f"--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1 --rollout-batch-size 8 "
        "--n-samples-per-prompt 4 --rollout-max-response-len 64 --colocate --device cuda "
        "--actor-num-gpus-per-node 8 --pipeline-model-parallel-size 2 "
    )
    text = describe(parse_config(f"{base} --num-layers-per-virtual-pipeline-stage 3".split()))
    assert "layers    6 + 6 on the pipeline's ranks in 2 virtual stages, micro-batches in groups of 2" in text
    text = describe(parse_config([*base.split(), "--pipeline-model-parallel-layout", "Et*5|t*7,L"]))
    assert "layers    5 + 7 on the pipeline's ranks\n" in text
    with pytest.raises(ValueError, match=r"got 32 for 4 ranks \* 9 = 36; every rank needs a sample"):
        flags = (
            "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 9"
        )
        parse_config(
            [*base.split(), *flags.split(), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"]
        )


def test_plan_of_a_critic_on_gpus_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    base = (
        f"--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1 --rollout-batch-size 32 "
        "--rollout-max-response-len 64 --colocate --device cuda --actor-num-gpus-per-node 8 --advantage-estimator ppo "
        "--tensor-model-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --global-batch-size 32 "
        "--offload-train --kl-coef 0.1"
    ).split()
    text = describe(parse_config([*base, "--critic-num-nodes", "1", "--critic-num-gpus-per-node", "4"]))
    for line in (
        "trainer   1 node x 8 = 8 ranks: tensor parallel 2 x data parallel 4",
        "critic    1 node x 4 = 4 ranks: tensor parallel 2 x data parallel 2",
        "step      values (critic) -> train critic",
        "sent      old_log_probs, ref_log_probs from the trainer's ranks to the critic's, in each step",
        "sent      values from the critic's ranks to the trainer's, in each step",
        "needs     12 GPUs; this machine has",
        "Memory of a critic rank\n  critic weights ",
        "Loading, per critic rank\n  weights read ",
    ):
        assert line in text, line
    alike = describe(parse_config([*base, "--critic-num-gpus-per-node", "8"]))
    assert "needs     8 GPUs" in alike and "--critic-devices own gives it devices of its own" in alike
    assert "Memory of a critic rank" not in alike


def moe_flags(tmp_path):
    """Returns flags with engines of two GPUs and a model with experts."""
    routed = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    shape = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    }
    model = QWEN3_4B | shape | routed | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return (
        f"--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1 --rollout-batch-size 8 "
        "--n-samples-per-prompt 4 --rollout-max-response-len 64 --actor-num-gpus-per-node 2 --rollout-num-gpus 2 "
        "--rollout-num-gpus-per-engine 2 --update-weight-transport disk --check-weight-update-equal"
    ).split()


def test_replicas_of_an_engine_share_the_experts(tmp_path):
    """As in slime's scripts, each GPU has the whole attention, and all GPUs share the experts."""
    spread = ["--sglang-dp-size", "2", "--sglang-ep-size", "2", "--sglang-enable-dp-attention"]
    flags = [*moe_flags(tmp_path), "--device", "cuda"]
    experts = 48 * 128 * 3 * 2048 * 768
    wholes = engine_memory(parse_config(flags), Shape.of(json.loads((tmp_path / "config.json").read_text())))
    c = parse_config([*flags, *spread])
    assert c.engine.backend_args["enable_expert_parallel"] is True
    found = engine_memory(c, Shape.of(json.loads((tmp_path / "config.json").read_text())))
    params = wholes[0].bytes  # two bytes each, over two GPUs
    assert found[0].bytes == 2 * (params - experts) + experts
    assert found[0].arithmetic == "1.54 G x 2 B / 1 GPUs + 29 G of experts x 2 B / 2 GPUs"
