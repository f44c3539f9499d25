"""Plans whole launch lines in the style of slime's scripts in this process: the model flags of a family, converted
checkpoints, SGLang's flags, hooks with separate settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vime.backends import parse_config
from vime.cli import main
from vime.vllm.server_flags import engine_settings

QWEN = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
EXPERTS = QWEN | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
MODEL = (
    "--swiglu --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --kv-channels 16 --qk-layernorm --use-rotary-position-embeddings --disable-bias-linear "
    "--normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 512 "
    "--untie-embeddings-and-output-weights --no-position-embedding "
)
MOE = (
    "--num-experts 8 --moe-ffn-hidden-size 64 --moe-router-topk 2 --moe-layer-freq [1]*4 --moe-grouped-gemm "
    "--moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0 "
    "--moe-router-dtype fp32 --moe-permute-fusion --moe-token-drop-policy probs "
)
WEIGHTS = (
    "--hf-checkpoint {dir}/model --ref-load {dir}/model_torch_dist --load {dir}/saved --save {dir}/saved "
)
DATA = "--prompt-data {dir}/prompts.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle "
ROLLOUT = (
    "--rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 1024 --rollout-temperature 1 --global-batch-size 256 --balance-data "
)
EVAL = "--eval-interval 20 --eval-prompt-data aime {dir}/prompts.jsonl --n-samples-per-eval-prompt 16 --eval-top-p 1 "
GRPO = (
    "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 "
    "--eps-clip 0.2 --eps-clip-high 0.28 --use-tis "
)
OPTIMIZER = (
    "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 "
    "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
)
PARALLEL = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 9216 --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
    "--attention-softmax-in-fp32 --attention-backend flash "
)
BASE = WEIGHTS + DATA + ROLLOUT + GRPO + OPTIMIZER + PARALLEL
APART = (
    "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 "
)
OPD = (
    "--prompt-data {dir}/prompts.jsonl --input-key prompt --apply-chat-template --num-rollout 300 "
    "--rollout-batch-size 16 --n-samples-per-prompt 4 --rollout-max-response-len 1024 --global-batch-size 64 "
    "--advantage-estimator grpo --use-opd --opd-kl-coef 1.0 --use-kl-loss --kl-loss-coef 0.00 "
)
LAUNCHES = {
    "dense, colocated": "--colocate --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 "
    "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --use-wandb --wandb-project p --wandb-key x "
    "--custom-config-path {dir}/hooks.yaml " + BASE + MODEL + EVAL,
    "dense, apart": "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --sglang-cuda-graph-max-bs 8 "
    "--sglang-enable-deterministic-inference --deterministic-mode --sglang-attention-backend flashinfer "
    "--num-layers-per-virtual-pipeline-stage 1 " + BASE + MODEL,
    "experts, engines over several nodes": "--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 8 "
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 8 "
    "--num-gpus-per-node 4 --sglang-enable-dp-attention --sglang-dp-size 4 --sglang-ep-size 8 "
    "--sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1 --sglang-moe-a2a-backend deepep "
    "--sglang-deepep-mode auto --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 "
    "--sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4 --sglang-watchdog-timeout 3600 "
    "--moe-enable-deepep " + BASE + MODEL + MOE + "--moe-token-dispatcher-type flex",
    "distillation on the trainer's ranks": APART + OPD + "--rm-type math --opd-type megatron "
    "--opd-teacher-load {dir}/model_torch_dist " + WEIGHTS + OPTIMIZER + PARALLEL + MODEL,
    "distillation from a server": APART + OPD + "--opd-type sglang --rm-url http://127.0.0.1:13141/generate "
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func --custom-reward-post-process-path "
    "slime.rollout.on_policy_distillation.post_process_rewards " + WEIGHTS + OPTIMIZER + PARALLEL + MODEL,
    "supervised": "--actor-num-nodes 1 --actor-num-gpus-per-node 8 "
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
    "--calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only --num-epoch 3 "
    "--prompt-data {dir}/prompts.jsonl --input-key messages --rollout-batch-size 128 --global-batch-size 128 "
    + WEIGHTS + OPTIMIZER + PARALLEL + MODEL + "--lr-decay-style cosine --min-lr 1e-7 --lr-warmup-fraction 0.1",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, hf_config in (("model", QWEN), ("experts", EXPERTS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(hf_config))
        release = tmp_path / f"{name}_torch_dist" / "release"
        release.mkdir(parents=True)
        (release / ".metadata").touch()
        (release.parent / "latest_checkpointed_iteration.txt").write_text("release")
    row = {
        "prompt": "1+1=",
        "label": "2",
        "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
    }
    (tmp_path / "prompts.jsonl").write_text((json.dumps(row) + "\n") * 256)
    (tmp_path / "hooks.yaml").write_text("max_turns: 2\n")
    return tmp_path


def planned(folder: Path, name: str) -> list[str]:
    text = LAUNCHES[name].format(dir=folder)
    return [*(text.replace("/model", "/experts") if "experts" in name else text).split(), "--device", "cuda"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_line_is_planned_as_it_stands(folder, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "wandb", None)  # this hides an installed package
    assert main(["plan", *planned(folder, name)]) == 0
    out = capsys.readouterr().out
    notes = out.partition("\nNotes\n")[2]
    assert "\non the host:\n" in out.replace("  ", "")
    for flag, why in {
        "--use-wandb": "--use-wandb: the package wandb is not installed",
        "--custom-config-path": "--custom-config-path: max_turns: no flags, so hooks find them in args",
        "--use-precision-aware-optimizer": "--use-precision-aware-optimizer has no effect with --",
        "--moe-enable-deepep": "--moe-enable-deepep, --moe-token-dispatcher-type flex: no effect on the result",
        "--sglang-dp-size": "--sglang-dp-size 4 becomes nothing (an engine of several nodes splits its layers",
        "--sglang-enable-deterministic-inference": "becomes --vllm-batch-invariant",
    }.items():
        assert flag not in LAUNCHES[name] or why in notes
    assert "--kl-loss-coef 0 only reports the KL" in notes or name == "supervised"


def test_one_report_has_every_reason(folder, capsys):
    """One report covers five stages: flags, their translation, hooks, the model with MODEL_ARGS, and the prompts."""
    (folder / "model" / "config.json").write_text(json.dumps(QWEN | {"model_type": "qwen9"}))
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1="\n')
    more = "--sglang-enable-lora --lrr 1 --custom-rm-path nowhere.f --custom-config-path {dir}/none.yaml --use-opd"
    text = LAUNCHES["dense, apart"].format(dir=folder).replace("--num-layers 4", "--num-layers 5")
    assert main(["plan", *text.split(), *more.format(dir=folder).split()]) == 2
    told = capsys.readouterr().err
    for reason in (
        "--sglang-enable-lora must be left out; --lora-rank",
        "--lrr is not a known flag; did you mean --lr?",
        "--opd-type must be given with --use-opd",
        "--custom-config-path must name a YAML file",
        "--custom-rm-path must name a module that can be imported, got 'nowhere.f'",
        "--num-layers is 5, config.json has 4",
        "model_type in config.json must be one of",
        "prompts.jsonl",
    ):
        assert told.count(reason) >= 1, reason
    assert "Traceback" not in told


def test_deterministic_inference_sets_the_engines_environment(folder):
    """vLLM has batch invariance on GPUs only."""
    argv = planned(folder, "dense, apart")
    assert engine_settings(parse_config(argv))["env"] == {"VLLM_BATCH_INVARIANT": "1"}
    c = parse_config([*argv, "--device", "cpu"])
    assert engine_settings(c)["env"] == {}
    assert any(note.startswith("--vllm-batch-invariant has no effect on CPU engines") for note in c.notes)
