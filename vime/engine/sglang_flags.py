"""`--sglang-*` flags of existing launch scripts -> their `--vllm-*` counterparts, each with a remark.

A flag with no counterpart is an error that names it; none is dropped without saying why.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from slime.config.config_file import FlagGroup
from slime.config.fields import nearest
from slime.config.problems import Problems

PREFIX = "sglang_"

RENAMED = {
    "max_running_requests": "vllm_max_num_seqs",
    "cuda_graph_max_bs": "vllm_max_cudagraph_capture_size",
    "cuda_graph_bs": "vllm_cudagraph_capture_sizes",
    "dp_size": "vllm_data_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "context_length": "vllm_max_model_len",
    "dtype": "vllm_dtype",
    "quantization": "vllm_quantization",
    "kv_cache_dtype": "vllm_kv_cache_dtype",
    "load_format": "vllm_load_format",
    "random_seed": "vllm_seed",
    "page_size": "vllm_block_size",
    "log_level_http": "vllm_uvicorn_log_level",
    "json_model_override_args": "vllm_hf_overrides",
    "disable_radix_cache": "vllm_no_enable_prefix_caching",
    "disable_cuda_graph": "vllm_enforce_eager",
    "trust_remote_code": "trust_remote_code",
    "server_concurrency": "vllm_server_concurrency",
    "router_ip": "vllm_router_ip",
    "router_port": "vllm_router_port",
    "router_request_timeout_secs": "vllm_router_request_timeout_secs",
    "router_policy": "router_policy",
}
"""Same meaning under another name."""

MAPPED: dict[str, tuple[str, dict[str, str]]] = {
    "attention_backend": (
        "vllm_attention_backend",
        {
            "fa3": "FLASH_ATTN",
            "flashinfer": "FLASHINFER",
            "flashmla": "FLASHMLA",
            "cutlass_mla": "CUTLASS_MLA",
            "triton": "TRITON_ATTN",
            "torch_native": "TORCH_SDPA",
            "flex_attention": "FLEX_ATTENTION",
        },
    ),
    "moe_a2a_backend": (
        "vllm_all2all_backend",
        {"deepep": "deepep_high_throughput", "none": "allgather_reducescatter"},
    ),
    "deepep_mode": (
        "vllm_all2all_backend",
        {
            "auto": "deepep_high_throughput",
            "normal": "deepep_high_throughput",
            "low_latency": "deepep_low_latency",
        },
    ),
    "reasoning_parser": (
        "vllm_reasoning_parser",
        {"qwen3": "qwen3", "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3", "glm45": "glm45"},
    ),
    "tool_call_parser": (
        "vllm_tool_call_parser",
        {
            "qwen": "hermes",
            "qwen25": "hermes",
            "qwen3_coder": "qwen3_coder",
            "deepseekv3": "deepseek_v3",
            "glm45": "glm45",
            "kimi_k2": "kimi_k2",
            "llama3": "llama3_json",
            "mistral": "mistral",
        },
    ),
}
"""Another name, and other names for the values."""

DROPPED = {
    "enable_metrics": "vLLM always serves /metrics",
    "enable_dp_attention": "in vLLM it follows from --vllm-data-parallel-size",
}
"""The purpose is met without a flag."""

_ENGINE_SIZE = "GPUs of one engine: --rollout-num-gpus-per-engine {}"
_ADDRESS = "engines listen where the engine pool places them"
REFUSED = {
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size"), _ENGINE_SIZE),
    **dict.fromkeys(
        ("pp_size", "pipeline_parallel_size"), "stages of one engine: --vllm-pipeline-parallel-size {}"
    ),
    **dict.fromkeys(("model", "model_path"), "engines serve --hf-checkpoint"),
    **dict.fromkeys(("host", "port"), _ADDRESS),
}
"""What another flag decides, in words; {} is the value that was given."""

SPECULATIVE = ("algorithm", "num_steps", "num_draft_tokens", "eagle_topk", "draft_model_path")
_METHODS = {"NEXTN": "mtp", "EAGLE": "eagle", "EAGLE3": "eagle3"}


def translate_sglang(groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
    """Every `--sglang-*` group as flags that have an owner, with a remark. ValueError names the others."""
    out: list[FlagGroup] = []
    notes: list[str] = []
    speculative: dict[str, FlagGroup] = {}
    problems = Problems()
    for group in groups:
        if not group.name.startswith(PREFIX):
            out.append(group)
            continue
        name = group.name.removeprefix(PREFIX)
        if name.startswith("speculative_") and name.removeprefix("speculative_") in SPECULATIVE:
            speculative[name.removeprefix("speculative_")] = group
            continue
        if (translated := problems.check(_translate, name, group, origin=group.origin)) is not None:
            new, why = translated
            out += new
            notes.append(_remark(group, new, why))
    if speculative and (joined := problems.check(_speculative_config, speculative)) is not None:
        out.append(joined)
        notes.append(
            _remark(next(iter(speculative.values())), [joined], "the --sglang-speculative-* flags together")
        )
    problems.report()
    return out, notes


def targets() -> dict[str, str]:
    """SGLang flag name (no prefix, underscores) -> what it becomes, in words; for `vime flags`."""
    rows = {name: "--" + target.replace("_", "-") for name, target in RENAMED.items()}
    rows |= {name: "--" + target.replace("_", "-") for name, (target, _) in MAPPED.items()}
    rows |= {name: f"nothing: {why}" for name, why in DROPPED.items()}
    rows |= {name: doc for name, (_, doc) in SPECIAL.items()}
    rows |= {f"speculative_{name}": "an entry of --vllm-speculative-config" for name in SPECULATIVE}
    return rows


def _group(name: str, *values: str) -> FlagGroup:
    return FlagGroup("--" + name.replace("_", "-"), name, list(values))


def _remark(old: FlagGroup, new: list[FlagGroup], why: str) -> str:
    became = " ".join(" ".join([g.typed, *g.values]) for g in new) or "nothing"
    return f"{' '.join([old.typed, *old.values])} becomes {became}" + (f" ({why})" if why else "")


def _translate(name: str, group: FlagGroup) -> tuple[list[FlagGroup], str]:
    """The flags one SGLang flag becomes, and the reason where it is not a plain renaming."""
    if name in RENAMED:
        return [_group(RENAMED[name], *group.values)], ""
    if name in MAPPED:
        target, values = MAPPED[name]
        value = _one(group)
        if value not in values:
            raise ValueError(
                f"{group.typed} must be one of {', '.join(values)} to have a vLLM counterpart, got {value}"
            )
        return [_group(target, values[value])], ""
    if name in DROPPED:
        return [], DROPPED[name]
    if name in SPECIAL:
        return SPECIAL[name][0](group)
    if name in REFUSED:
        instead = REFUSED[name].format(" ".join(group.values)).rstrip()
        raise ValueError(f"{group.typed} must be left out; {instead}")
    near = nearest(name, targets(), prefix="--sglang-")
    raise ValueError(f"{group.typed} must be left out: vLLM has no counterpart that is known here{near}")


def _one(group: FlagGroup) -> str:
    if len(group.values) != 1:
        raise ValueError(
            f"{group.typed} must be followed by one value, got {' '.join(group.values) or 'none'}"
        )
    return group.values[0]


def _number(group: FlagGroup) -> int:
    try:
        return int(_one(group))
    except ValueError as error:
        raise ValueError(
            f"{group.typed} must be an integer, got {' '.join(group.values) or 'none'}"
        ) from error


def _memory(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    """SGLang's fraction covers weights and KV cache; vLLM's covers activations too.

    The same number can therefore not use more memory than it did, only a smaller KV cache.
    """
    why = "vLLM counts activations in, so the KV cache is smaller than SGLang's at the same number"
    return [_group("vllm_gpu_memory_utilization", _one(group))], why


def _expert_parallel(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    """vLLM spreads experts over all GPUs of an engine, or not at all."""
    if _number(group) > 1:
        return [_group("vllm_enable_expert_parallel")], "over all GPUs of an engine"
    return [], "one rank is no expert parallelism"


def _chunked_prefill(group: FlagGroup) -> tuple[list[FlagGroup], str]:
    if _number(group) > 0:
        return [_group("vllm_max_num_batched_tokens", _one(group))], ""
    return [_group("vllm_no_enable_chunked_prefill")], ""


SPECIAL: dict[str, tuple[Callable[[FlagGroup], tuple[list[FlagGroup], str]], str]] = {
    "mem_fraction_static": (_memory, "--vllm-gpu-memory-utilization"),
    "ep_size": (_expert_parallel, "--vllm-enable-expert-parallel when above 1"),
    "expert_parallel_size": (_expert_parallel, "--vllm-enable-expert-parallel when above 1"),
    "chunked_prefill_size": (
        _chunked_prefill,
        "--vllm-max-num-batched-tokens, or --vllm-no-enable-chunked-prefill when not above 0",
    ),
}
"""Not a renaming: (function, what it becomes in words)."""


def _speculative_config(given: dict[str, FlagGroup]) -> FlagGroup:
    """SGLang's chain speculation as vLLM's JSON. Tree speculation (eagle-topk above 1) has no counterpart."""
    typed = next(iter(given.values())).typed
    for needed in ("algorithm", "num_steps"):
        if needed not in given:
            raise ValueError(
                f"--sglang-speculative-{needed.replace('_', '-')} must be given with {typed}, got none"
            )
    steps = _number(given["num_steps"])
    if "eagle_topk" in given and _number(given["eagle_topk"]) != 1:
        got = _one(given["eagle_topk"])
        raise ValueError(
            f"--sglang-speculative-eagle-topk must be 1, got {got}; vLLM drafts one chain, not a tree"
        )
    if "num_draft_tokens" in given and _number(given["num_draft_tokens"]) != steps + 1:
        got = _one(given["num_draft_tokens"])
        raise ValueError(
            f"--sglang-speculative-num-draft-tokens must be num-steps + 1 = {steps + 1}, got {got}; "
            "vLLM drafts one chain"
        )
    algorithm = _one(given["algorithm"])
    if algorithm not in _METHODS:
        raise ValueError(
            f"--sglang-speculative-algorithm must be one of {', '.join(_METHODS)}, got {algorithm}"
        )
    config: dict[str, str | int] = {"method": _METHODS[algorithm], "num_speculative_tokens": steps}
    if "draft_model_path" in given:
        config["model"] = _one(given["draft_model_path"])
    elif algorithm == "EAGLE":
        # Without a draft model SGLang's EAGLE runs the checkpoint's own multi-token-prediction layers.
        config["method"] = "mtp"
    return _group("vllm_speculative_config", json.dumps(config))
