"""Tests `--sglang-*` flags: the flag that each becomes, and those without a counterpart."""

import json

import pytest

from slime.config.config_file import split_argv
from vime.sglang_api.tables import ENGINE_DECIDES, MAPPED, RENAMED
from vime.sglang_api.translate_flags import SPECIAL, targets, translate_sglang

ENGINE_OF_32 = "--rollout-num-gpus-per-engine 32"


def translated(text: str) -> str:
    groups, _ = translate_sglang(split_argv(text.split()))
    return " ".join(" ".join([g.typed, *g.values]) for g in groups)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--lr 1 --sglang-max-running-requests 64", "--lr 1 --vllm-max-num-seqs 64"),
        ("--sglang-mem-fraction-static 0.7", "--vllm-gpu-memory-utilization 0.7"),
        ("--sglang-cuda-graph-bs 1 2 4", "--vllm-cudagraph-capture-sizes 1 2 4"),
        ("--sglang-cuda-graph-max-bs=16", "--vllm-max-cudagraph-capture-size 16"),
        ("--sglang-ep-size 8", "--vllm-enable-expert-parallel"),
        ("--sglang-ep-size 1", ""),
        ("--sglang-dp-size 2 --sglang-enable-dp-attention", "--vllm-data-parallel-size 2"),
        ("--sglang-dp-size 4 --sglang-enable-dp-attention --rollout-num-gpus-per-engine 32", ENGINE_OF_32),
        (
            "--num-gpus-per-node 4 --rollout-num-gpus-per-engine 8 --sglang-dp-size 2",
            "--num-gpus-per-node 4 --rollout-num-gpus-per-engine 8",
        ),
        (
            "--gpu gb200 --rollout-num-gpus-per-engine 8 --sglang-dp-size 2",
            "--gpu gb200 --rollout-num-gpus-per-engine 8",
        ),
        ("--sglang-enable-dp-lm-head --sglang-moe-dense-tp-size 1 --sglang-watchdog-timeout 3600", ""),
        ("--sglang-attention-backend nsa --sglang-nsa-decode-backend flashmla_sparse", ""),
        ("--sglang-enable-deterministic-inference", "--vllm-batch-invariant"),
        ("--sglang-mamba-ssm-dtype float32", "--vllm-mamba-ssm-cache-dtype float32"),
        ("--sglang-chunked-prefill-size 4096", "--vllm-max-num-batched-tokens 4096"),
        ("--sglang-chunked-prefill-size -1", "--vllm-no-enable-chunked-prefill"),
        ("--sglang-attention-backend fa3", "--vllm-attention-backend FLASH_ATTN"),
        ("--sglang-moe-a2a-backend deepep", "--vllm-all2all-backend deepep_high_throughput"),
        ("--sglang-deepep-mode low_latency", "--vllm-all2all-backend deepep_low_latency"),
        ("--sglang-tool-call-parser qwen25", "--vllm-tool-call-parser hermes"),
        ("--sglang-reasoning-parser qwen3", "--vllm-reasoning-parser qwen3"),
        ("--sglang-server-concurrency 64", "--vllm-server-concurrency 64"),
        ("--sglang-context-length 8192", "--vllm-max-model-len 8192"),
        ("--sglang-enable-metrics", ""),
    ],
)
def test_counterparts(given, expected):
    assert translated(given) == expected


def test_speculative_flags_become_one():
    flags = "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1"
    name, value = translated(flags + " --sglang-speculative-num-draft-tokens 4").split(" ", 1)
    assert name == "--vllm-speculative-config"
    assert json.loads(value) == {"method": "mtp", "num_speculative_tokens": 3}
    _, value = translated(
        flags.replace("EAGLE ", "EAGLE3 ") + " --sglang-speculative-draft-model-path d"
    ).split(" ", 1)
    assert json.loads(value) == {"method": "eagle3", "num_speculative_tokens": 3, "model": "d"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--sglang-config c.yaml", "--sglang-config must name a file, got c.yaml (No such file"),
        (
            "--sglang-enable-lora",
            "--sglang-enable-lora must be left out; --lora-rank and --target-modules train an adapter",
        ),
        ("--sglang-max-runing-requests 1", "did you mean --sglang-max-running-requests?"),
        ("--sglang-attention-backend dual", "--sglang-attention-backend must be one of fa3, fa4, flashinfer"),
        (
            "--sglang-tp-size 2",
            "--sglang-tp-size must be left out; GPUs of one engine: --rollout-num-gpus-per-engine 2",
        ),
        ("--sglang-pp-size 2", "stages of one engine: --vllm-pipeline-parallel-size 2"),
        ("--sglang-model-path m", "--sglang-model-path must be left out; engines serve --hf-checkpoint"),
        ("--sglang-ep-size many", "--sglang-ep-size must be an integer, got many"),
        (
            "--sglang-mem-fraction-static",
            "--sglang-mem-fraction-static must be followed by one value, got none",
        ),
        ("--sglang-speculative-num-steps 3", "--sglang-speculative-algorithm must be given with"),
        (
            "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 4",
            "--sglang-speculative-eagle-topk must be 1, got 4",
        ),
        (
            "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 "
            "--sglang-speculative-num-draft-tokens 8",
            "--sglang-speculative-num-draft-tokens must be num-steps + 1 = 4, got 8",
        ),
        (
            "--sglang-speculative-algorithm NGRAM --sglang-speculative-num-steps 3",
            "--sglang-speculative-algorithm must be one of NEXTN, EAGLE, EAGLE3, got NGRAM",
        ),
    ],
)
def test_no_counterpart_is_an_error(given, message):
    with pytest.raises(ValueError) as error:
        translated(given)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["foo", "rollout-batch"])
def test_no_name_is_proposed_that_is_not_near(name):
    with pytest.raises(ValueError) as error:
        translated(f"--sglang-{name}")
    assert "did you mean" not in str(error.value)
    assert str(error.value).endswith(
        "no flag of SGLang with this name is known here; `vime flags sglang` lists them"
    )


def test_every_translation_is_remarked():
    groups, notes = translate_sglang(
        split_argv(["--sglang-enable-metrics", "--sglang-dtype", "bfloat16", "--lr", "1"])
    )
    assert [g.typed for g in groups] == ["--vllm-dtype", "--lr"]
    assert notes == [
        "--sglang-enable-metrics becomes nothing (vLLM always serves /metrics)",
        "--sglang-dtype bfloat16 becomes --vllm-dtype bfloat16",
    ]


def test_tables_do_not_overlap_and_are_all_listed():
    names = [*RENAMED, *MAPPED, *ENGINE_DECIDES, *SPECIAL]
    assert len(names) == len(set(names))
    assert set(names) <= set(targets())
