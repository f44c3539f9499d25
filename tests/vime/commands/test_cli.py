"""Tests the command line: exit codes, one-line errors, stock scripts, the plan's arithmetic."""

import gc
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from architectures import ARCHITECTURES

from slime.plan.model_shape import Shape
from slime.rules.flags import own_flags
from vime.backends import BACKENDS, parse_config
from vime.cli import main
from vime.commands import COMMANDS
from vime.plan.command import describe
from vime.pool.engine_flags import ROUTER_RESERVED
from vime.sglang_api.tables import ANY, MAPPED, RENAMED
from vime.vllm.backend import ENGINE_SHARE
from vime.vllm.memory import engine_memory
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.server_flags import ROUTER, VLLM, VLLM_RESERVED, engine_settings

ROOT = Path(__file__).parents[3]
async_argv = runpy.run_path(str(ROOT / "train_async.py"))["async_argv"]
QWEN3_4B = {"model_type": "qwen3", "hidden_act": "silu", **ARCHITECTURES["qwen3-4b"].config_fields()}
STOCK = """
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --device cuda
--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
--normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
--qk-layernorm
--hf-checkpoint {dir} --ref-load {dir} --load {dir}/out --save {dir}/out --save-interval 20
--prompt-data {dir}/p.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
--rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
--rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256 --balance-data
--eval-interval 20 --eval-prompt-data aime {dir}/p.jsonl --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-top-p 1
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--use-dynamic-batch-size --max-tokens-per-gpu 9216
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
--eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32 --attention-backend flash
"""


@pytest.fixture
def stock(tmp_path: Path) -> list[str]:
    """Returns the unchanged arguments of slime's Qwen3-4B script."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 64)
    return STOCK.format(dir=tmp_path).split()


def renamed(stock: list[str]) -> list[str]:
    return [w.replace("--sglang-mem-fraction-static", "--vllm-gpu-memory-utilization") for w in stock]


def test_stock_script_parses_as_it_is_and_with_vllm_names(stock):
    c = parse_config(stock)
    assert c.engine.backend_args == {"gpu_memory_utilization": 0.7}
    settings = engine_settings(c)
    assert (settings["tensor_parallel_size"], settings["dtype"], settings["device"]) == (
        2,
        "bfloat16",
        "cuda",
    )
    assert settings["vllm_argv"] == ("--gpu-memory-utilization", "0.7")
    server = VllmServer(VllmSpec(**settings, run_key="k", log_path=""))
    assert server.command()[-2:] == ["--gpu-memory-utilization", "0.7"]
    assert (c.num_engines, c.data_parallel_size, c.data.num_steps_per_rollout) == (4, 4, 1)
    assert (
        c.algorithm.eps_clip_high,
        c.megatron.adam_beta2,
        c.megatron.lr,
        c.evaluation.eval_max_response_len,
    ) == (0.28, 0.98, 1e-6, 16384)
    assert c.megatron.overrides == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "grad_reduce_in_fp32": True,
        "attention_softmax_in_fp32": True,
        "attention_backend": "flash",
    }
    assert len(c.notes) == 3 and c.notes[0].startswith(
        "--sglang-mem-fraction-static 0.7 becomes --vllm-gpu-memory"
    )
    assert c.notes[-1] == "8 GPUs: runs on more than 4 of a host have not been made in this version"
    d = parse_config(renamed(stock))
    assert len(d.notes) == 2 and d.engine.backend_argv == c.engine.backend_argv


def test_vllm_and_router_flags_reach_their_parsers(stock):
    flags = "--vllm-enforce-eager --vllm-max-num-seqs=256 --vllm-no-enable-prefix-caching"
    router = "--router-balance_abs_threshold 10 --router-policy round_robin"
    c = parse_config([*stock, *flags.split(), "--vllm-cudagraph-capture-sizes", "1", "2", *router.split()])
    assert (
        c.engine.backend_args["enforce_eager"] is True
        and c.engine.backend_args["enable_prefix_caching"] is False
    )
    assert (
        c.engine.backend_args["cudagraph_capture_sizes"] == [1, 2]
        and c.engine.backend_args["max_num_seqs"] == 256
    )
    assert c.engine.router_args == {"balance_abs_threshold": 10, "policy": "round_robin"}
    assert c.engine.router_argv == ["--balance-abs-threshold", "10", "--policy", "round_robin"]
    assert c.namespace().vllm_max_num_seqs == 256


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "--vllm-max-numseqs 3",
            "--vllm-max-numseqs is not a flag of vLLM; did you mean --vllm-max-num-seqs?",
        ),
        (
            "--vllm-max-num-seqs abc",
            "--vllm-max-num-seqs must be valid for vLLM, got invalid int value: 'abc'",
        ),
        ("--vllm-max-num-seqs", "--vllm-max-num-seqs must be valid for vLLM, got expected one argument"),
        (
            "--vllm-enforce-eager yes",
            "--vllm-enforce-eager must have no more values than it takes, got 'yes'",
        ),
        ("--vllm-api-key x", "--vllm-api-key must be left out; every server of a run gets the run's own key"),
        ("--router-api-key x", "--router-api-key must be left out"),
        ("--vllm-logprobs-mode raw_logits", "--vllm-logprobs-mode must be left out; training needs"),
        ("--router-polcy x", "--router-polcy is not a flag of vllm-router; did you mean --router-policy?"),
        ("--router-policy x", "--router-policy must be valid for vllm-router, got invalid choice: 'x'"),
        ("--vllm-tensor-parallel-size 4", "got 2 and 4 * 1 * 1 = 4"),
        (
            "--no-colocate --rollout-num-gpus 2 --update-weight-transport nccl --vllm-data-parallel-size 2",
            "must go with engines that are tensor parallel only, got --vllm-data-parallel-size 2 and",
        ),
        (
            "--no-colocate --rollout-num-gpus 2 --update-weight-transport nccl --vllm-pipeline-parallel-size 2",
            "--vllm-data-parallel-size 1 and --vllm-pipeline-parallel-size 2; use disk",
        ),
        (
            "--rollout-num-gpus 6 --no-colocate --rollout-num-gpus-per-engine 3",
            "--rollout-num-gpus-per-engine must divide the model's 32 attention heads, got 3; use 2 or 4",
        ),
        (
            "--rollout-num-gpus 6 --no-colocate --rollout-num-gpus-per-engine 6 --vllm-data-parallel-size 2",
            "--vllm-tensor-parallel-size must divide the model's 32 attention heads, got 3; use 2 or 4",
        ),
        (
            "--check-weight-update-equal --vllm-pipeline-parallel-size 2",
            "--check-weight-update-equal must go with engines of one pipeline stage, got",
        ),
        (
            "--vllm-nnodes 2",
            "--vllm-nnodes must be left out; they follow from --rollout-num-gpus-per-engine and",
        ),
        (
            "--num-gpus-per-node 1 --vllm-distributed-executor-backend ray",
            "--vllm-distributed-executor-backend must be mp with an engine of 2 nodes (--num-gpus-per-node 1), got ray",
        ),
        (
            "--num-gpus-per-node 1 --vllm-data-parallel-size 2",
            "--vllm-data-parallel-size must be 1 with an engine of 2 nodes (--num-gpus-per-node 1), got 2; lower",
        ),
        (
            "--vllm-max-model-len 4096",
            "--vllm-max-model-len must hold the longest rollout, got 4096 for 8192 tokens",
        ),
        (
            "--sglang-router-ip 10.0.0.1",
            "--vllm-router-port must be given with --vllm-router-ip, got none beside 10",
        ),
        ("--vlm-max-num-seqs 3", "--vlm-max-num-seqs is not a known flag"),
    ],
)
def test_wrong_engine_flags(stock, extra, message):
    with pytest.raises(ValueError) as error:
        parse_config([*stock, *extra.split()])
    assert message in str(error.value)


def test_reserved_and_translated_names_exist_in_the_pinned_engines():
    vllm, router = VLLM.options(), ROUTER.options()
    assert set(VLLM_RESERVED) - {"model_tag"} <= {a.dest for a in vllm.values()}
    assert set(ROUTER_RESERVED) <= {a.dest for a in router.values()}
    vllm_own = BACKENDS["vllm"]
    ours = {*own_flags(), *vllm_own.specs, *vllm_own.unsupported, *vllm_own.no_effect}
    for target in [*RENAMED.values(), *(target for target, _ in MAPPED.values())]:
        if target not in ours:
            owner, options = ("vllm_", vllm) if target.startswith("vllm_") else ("router_", router)
            assert target.removeprefix(owner) in options, target
    for name in (
        "gpu_memory_utilization",
        "enable_expert_parallel",
        "speculative_config",
        "no_enable_chunked_prefill",
    ):
        assert name in vllm
    choices = vllm["all2all_backend"].choices
    spreads = {*MAPPED["moe_a2a_backend"][1].values(), *MAPPED["deepep_mode"][1].values()} - {ANY}
    assert spreads <= set(choices)


def test_engine_memory_is_the_arithmetic_by_hand(stock):
    c, shape = parse_config(renamed(stock)), Shape.of(QWEN3_4B)
    assert [i.bytes for i in engine_memory(c, shape)] == [
        4_022_272_000,
        2 * 36 * 1024,
        2 * 36 * 1024 * 64 * 8192,
    ]


def test_engine_share_is_vllms_own_default():
    assert VLLM.options()["gpu_memory_utilization"].default == ENGINE_SHARE


def test_plan_prints_everything_and_starts_nothing(stock, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert main(["plan", *stock]) == 0
    out = capsys.readouterr().out
    for line in (
        "qwen3, 4.02 G parameters, bfloat16 on cuda",
        "1 node x 8 = 8 ranks: tensor parallel 2 x data parallel 4",
        "4 vLLM servers x 2 cuda, behind one vllm-router",
        "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples = --global-batch-size 256 x 1",
        "64 prompts = 2 rollouts an epoch",
        "evaluation aime: 64 prompts x 16 responses",
        "optimizer               5.62 GiB   4.02 G x 12 B / TP 2 / 4 shards",
        "update buckets          1.45 GiB   2, each --update-weight-buffer-size or the embedding",
        "peak                   24.43 GiB   reported against as perf/memory/estimate_gib",
        "what leaves the device while engines generate is decided when its memory is known, here it is not:",
        "  from 113.26 GiB on: nothing",
        "  from 88.28 GiB on: gradients",
        "  from 44.58 GiB on: gradients, parameters, optimizer",
        "  and training needs 34.98 GiB",
        "--vllm-gpu-memory-utilization            vLLM --gpu-memory-utilization 0.7",
        "(set for you)                            vLLM --tensor-parallel-size 2",
        "(set for you)                            vLLM --cudagraph-capture-sizes 1 2 4 ... 2048",
        "--use-kl-loss with --kl-loss-coef 0",
    ):
        assert line in out, line
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_shows_each_engine_flag_once_and_which_has_no_effect(stock, tmp_path, capsys):
    (tmp_path / "make_model.json").write_text('{"weights": null}')  # a shape, whose run is on another machine
    flags = (
        "--device cpu --rollout-num-gpus-per-engine 1 --vllm-max-num-seqs 64 --vllm-enable-chunked-prefill"
    )
    assert main(["plan", *stock, *flags.split()]) == 0
    out = capsys.readouterr().out
    for name in ("max-num-seqs", "enable-chunked-prefill", "kv-cache-memory-bytes="):
        (line,) = [line for line in out.splitlines() if f"-{name}" in line and " vLLM --" in line]
        assert ("(set for you)" in line) == (name == "kv-cache-memory-bytes=")
    assert out.count("--vllm-gpu-memory-utilization has no effect on CPU engines") == 1


def test_plan_shows_the_processes_of_an_engine_on_several_nodes(stock, capsys):
    assert main(["plan", *stock, "--num-gpus-per-node", "1"]) == 0
    out = capsys.readouterr().out
    assert "4 vLLM servers x 2 cuda, each 2 processes on 2 nodes of 1, behind one vllm-router" in out
    for flag in ("--nnodes 2", "--node-rank 0", "--distributed-executor-backend mp"):
        assert f"vLLM {flag}" in out
    assert "--master-addr" not in out, "known when the engine starts"


def test_plan_finds_a_malformed_prompt_line(stock, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "label": "b"}\n{"prompt": "a"}\n')
    assert main(["plan", *stock]) == 2
    err = capsys.readouterr().err
    assert "p.jsonl:2: column 'label' is missing" in err and "Traceback" not in err


@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_engines_that_no_broadcast_reaches_take_files(stock, axis):
    """The command gives no transport, so a missing transport is not an error."""
    apart = [*stock, "--no-colocate", "--rollout-num-gpus", "2"]
    assert parse_config(apart).weight_update.update_weight_transport == "nccl"
    c = parse_config([*apart, f"--vllm-{axis}-parallel-size", "2"])
    assert c.weight_update.update_weight_transport == "disk"
    (note,) = [note for note in c.notes if note.startswith("--update-weight-transport is disk, not nccl: ")]
    assert f"--vllm-{axis}-parallel-size 2" in note


def test_user_errors_are_one_line_and_exit_code_2(stock, capsys):
    for argv, message in [
        (["plan", *stock, "--lrr", "1"], "vime plan: --lrr is not a known flag; did you mean --lr?"),
        (["train", *stock, "--lrr", "1"], "vime train: --lrr is not a known flag; did you mean --lr?"),
        (
            ["pln"],
            f"vime pln: the command must be one of {', '.join(COMMANDS)}, got pln; did you mean vime plan?",
        ),
        (["flags", "--xml"], "vime flags: flags takes --json or words to search for, got --xml"),
        (["plot", "absent"], "vime plot: "),
    ]:
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.splitlines()[-1].startswith(message) and "Traceback" not in err


def test_help(capsys):
    assert main([]) == 0 and main(["--help"]) == 0
    assert all(f"vime {name}" in capsys.readouterr().out for name in list(COMMANDS)[:1])
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: vime train" in out and "--rollout-batch-size" in out
    assert main(["flags"]) == 0
    assert "--advantage-estimator" in capsys.readouterr().out


def test_flags_json_lists_every_flag_once_with_its_owner(capsys):
    assert main(["flags", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    flags = {row["flag"]: row for row in rows}
    assert len(flags) == len(rows) > 900
    assert flags["--rollout-batch-size"]["owner"] == "slime.config.data"
    assert flags["--vllm-max-num-seqs"]["translated_to"] == "vLLM --max-num-seqs"
    assert flags["--router-policy"]["owner"] == "vllm-router"
    assert flags["--sglang-max-running-requests"]["translated_to"] == "--vllm-max-num-seqs"
    assert flags["--no-rope-fusion"]["translated_to"] == "megatron-core apply_rope_fusion = False"
    assert flags["--use-opd"]["owner"] == "slime.config.distillation"
    assert flags["--rollout-buffer-url"]["owner"] == "not supported yet"
    assert set(rows[0]) == {"flag", "owner", "default", "help", "choices", "translated_to"}
    assert "--vllm-api-key" not in flags


def test_slime_entry_points(stock):
    assert async_argv(["--lr", "1"]) == ["--lr", "1", "--max-staleness", "1"]
    assert async_argv(["--max-staleness=2"]) == ["--max-staleness=2"]
    with pytest.raises(ValueError, match=r"--colocate must be left out of train_async\.py"):
        async_argv(stock)
    for script, message in (
        ("train.py", "  1. --lr must be of type float"),
        ("train_async.py", "--colocate must be left out"),
    ):
        command = [sys.executable, script, "--lr", "abc", "--colocate"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_plan_of_experts(tmp_path):
    """The layout is that of slime's Qwen3-30B-A3B on eight GPUs. The plan lists a rank's part of the experts
    separately."""
    routed = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    shape = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
    }
    model = QWEN3_4B | shape | routed | {"model_type": "qwen3_moe", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    layout = "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8"
    text = describe(
        parse_config(
            f"--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1 --rollout-batch-size 8 "
            "--n-samples-per-prompt 4 --rollout-max-response-len 64 --colocate --device cuda --moe-grouped-gemm "
            f"--actor-num-gpus-per-node 8 {layout} --expert-tensor-parallel-size 1".split()
        )
    )
    assert "30.5 G parameters, of the layers' 2.73 G for a token (8 of 128 experts)" in text
    assert "8 ranks: tensor parallel 4 x data parallel 2, experts over 8" in text
    assert re.search(r"expert weights +6\.75 GiB +29 G x 2 B / EP 8 / ETP 1\n", text)
    assert re.search(r"expert optimizer +40\.50 GiB +29 G x 12 B / EP 8 / ETP 1 / 1 shards\n", text)
    assert "--moe-grouped-gemm has no effect: experts of a layer are always computed together" in text
    assert "on the pipeline's ranks" not in text


def test_only_a_process_of_its_own_keeps_its_modules_from_the_collector(monkeypatch):
    before = gc.get_freeze_count()
    assert main(["flags", "rollout-batch-size"]) == 0
    assert gc.get_freeze_count() <= before and gc.isenabled()  # fewer if a cache drops old entries
    monkeypatch.setattr(sys, "argv", ["vime", "flags", "rollout-batch-size"])
    try:
        assert main() == 0
        assert gc.get_freeze_count() > before + 10_000 and gc.isenabled()
    finally:
        gc.unfreeze()
