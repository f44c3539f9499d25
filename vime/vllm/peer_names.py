"""Translates other trainers' settings for their vLLM engines into flags of this backend."""

from __future__ import annotations

from slime.config.fields import spelled
from slime.config.peer_names import build_table
from slime.config.peer_rows import OTHERS, TRL, VERL
from vime.sglang_api.tables import RENAMED, UPSTREAM

_ROLLOUT = "actor_rollout_ref.rollout"
_OWN_ENGINES = "the run starts its own engines without it"
_NO_GRAMMAR = "the trainer computes log-probs without a grammar"
_SIZES = {
    "tp": ("--rollout-num-gpus-per-engine {}", ""),
    "pp": ("--vllm-pipeline-parallel-size {}", ""),
    "dp": ("--vllm-data-parallel-size {}", ""),
}
_PREFIX_CACHE = {"true": "--vllm-enable-prefix-caching", "false": "--vllm-no-enable-prefix-caching"}
VLLM_PEER_NAMES = {
    **build_table(
        TRL,
        (
            (
                "vllm_mode",
                "--colocate",
                "for the mode colocate; otherwise --rollout-num-gpus",
                {"colocate": "--colocate", "server": "--rollout-num-gpus"},
            ),
            ("vllm_max_model_length", "--vllm-max-model-len {}", ""),
            (
                "vllm_importance_sampling_correction",
                "--use-tis",
                "",
                {"true": "--use-tis", "false": ""},
            ),
            ("vllm_importance_sampling_cap", "--tis-clip {}", "with --use-tis"),
            ("vllm_importance_sampling_mode", "--tis-level", "with --use-tis and --tis-mode"),
            ("vllm_server_base_url", "--rollout-external-engine-addrs {}", _OWN_ENGINES),
            ("vllm_server_host", "--rollout-external-engine-addrs", f"HOST:PORT; {_OWN_ENGINES}"),
            ("vllm_server_port", "--rollout-external-engine-addrs", f"HOST:PORT; {_OWN_ENGINES}"),
            ("vllm_server_timeout", "--engine-start-timeout-s {}", ""),
            ("vllm_group_port", "", "the run chooses its ports itself"),
            ("vllm_device", "", "--colocate or --rollout-num-gpus places the engines"),
            ("vllm_guided_decoding_regex", "", _NO_GRAMMAR),
            ("vllm_structured_outputs_regex", "", _NO_GRAMMAR),
        ),
    ),
    **build_table(
        VERL,
        (
            (f"{_ROLLOUT}.gpu_memory_utilization", "--vllm-gpu-memory-utilization {}", ""),
            (f"{_ROLLOUT}.max_model_len", "--vllm-max-model-len {}", ""),
            (f"{_ROLLOUT}.max_num_seqs", "--vllm-max-num-seqs {}", ""),
            (f"{_ROLLOUT}.max_num_batched_tokens", "--vllm-max-num-batched-tokens {}", ""),
            (f"{_ROLLOUT}.dtype", "--vllm-dtype {}", "", {"bfloat16": "", "auto": ""}),
            (
                f"{_ROLLOUT}.enforce_eager",
                "--vllm-enforce-eager",
                "",
                {"true": "--vllm-enforce-eager", "false": ""},
            ),
            (
                f"{_ROLLOUT}.enable_chunked_prefill",
                "--vllm-enable-chunked-prefill",
                "",
                {"true": "", "false": "--vllm-no-enable-chunked-prefill"},
            ),
            (f"{_ROLLOUT}.enable_prefix_caching", "--vllm-enable-prefix-caching", "", _PREFIX_CACHE),
            (
                f"{_ROLLOUT}.disable_log_stats",
                "--vllm-disable-log-stats",
                "",
                {"true": "--vllm-disable-log-stats", "false": ""},
            ),
            (f"{_ROLLOUT}.data_parallel_size", "--vllm-data-parallel-size {}", "", {"1": ""}),
            (f"{_ROLLOUT}.expert_parallel_size", "--vllm-enable-expert-parallel", "above 1", {"1": ""}),
        ),
    ),
    # names of SGLang with vLLM's prefix, and short names of sizes
    **build_table(
        OTHERS,
        (
            *(
                (f"vllm_{name}", f"{spelled(ours)} {{}}", "")
                for name, ours in RENAMED.items()
                if f"vllm_{name}" not in (ours, *UPSTREAM)
                and not ours.endswith(("caching", "eager", "remote_code"))
            ),
            *((f"vllm_{short}{end}", *ours) for short, ours in _SIZES.items() for end in ("", "_size")),
            *(
                (f"vllm_{name}", "--vllm-gpu-memory-utilization {}", "")
                for name in ("mem_fraction", "mem_fraction_static", "gpu_util", "gpu_memory")
            ),
            ("vllm_disable_radix_cache", "--vllm-no-enable-prefix-caching", ""),
            ("vllm_disable_cuda_graph", "--vllm-enforce-eager", ""),
            ("vllm_trust_remote_code", "--trust-remote-code", ""),
            ("max_model_len", "--vllm-max-model-len {}", "also --rollout-max-context-len"),
            ("gpu_memory_utilization", "--vllm-gpu-memory-utilization {}", ""),
            ("vllm_num_gpus_per_engine", "--rollout-num-gpus-per-engine {}", ""),
            (
                "vllm_num_engines",
                "--rollout-num-gpus",
                "a number of GPUs: engines x --rollout-num-gpus-per-engine",
            ),
        ),
    ),
}
