"""Defines the translation of `--sglang-*` flags as data. translate_flags.py applies it. Names have no prefix, and
underscores.

RENAMED, MAPPED: vLLM has the same setting. ENGINE_DECIDES: the answers are the same, and vLLM or this project decides.
REFUSED: another flag decides, or the answers would differ.
"""

from __future__ import annotations

UPSTREAM = {"vllm_router_policy": "router_policy"}
"""Flags in launch scripts of upstream vime whose name has another prefix here."""
RENAMED = {
    "max_running_requests": "vllm_max_num_seqs",
    "cuda_graph_max_bs": "vllm_max_cudagraph_capture_size",
    "cuda_graph_bs": "vllm_cudagraph_capture_sizes",
    "context_length": "vllm_max_model_len",
    "dtype": "vllm_dtype",
    "quantization": "vllm_quantization",
    "kv_cache_dtype": "vllm_kv_cache_dtype",
    "load_format": "vllm_load_format",
    "random_seed": "vllm_seed",
    "page_size": "vllm_block_size",
    "log_level_http": "vllm_uvicorn_log_level",
    "json_model_override_args": "vllm_hf_overrides",
    "mamba_ssm_dtype": "vllm_mamba_ssm_cache_dtype",
    "cpu_offload_gb": "vllm_cpu_offload_gb",
    "download_dir": "vllm_download_dir",
    "revision": "vllm_revision",
    "tokenizer_path": "vllm_tokenizer",
    "tokenizer_mode": "vllm_tokenizer_mode",
    "chat_template": "vllm_chat_template",
    "disable_radix_cache": "vllm_no_enable_prefix_caching",
    "disable_cuda_graph": "vllm_enforce_eager",
    "disable_custom_all_reduce": "vllm_disable_custom_all_reduce",
    "trust_remote_code": "trust_remote_code",
    "server_concurrency": "vllm_server_concurrency",
    "router_ip": "vllm_router_ip",
    "router_port": "vllm_router_port",
    "router_request_timeout_secs": "vllm_router_request_timeout_secs",
    "router_policy": "router_policy",
}
"""Flags with the same meaning under another name."""

ANY = ""
"""Entry of a table of values: vLLM decides."""

_ATTENTION = {
    "fa3": "FLASH_ATTN",
    "fa4": "FLASH_ATTN",
    "flashinfer": "FLASHINFER",
    "flashmla": "FLASHMLA",
    "cutlass_mla": "CUTLASS_MLA",
    "triton": "TRITON_ATTN",
    "flex_attention": "FLEX_ATTENTION",
    **dict.fromkeys(("torch_native", "trtllm_mla", "trtllm_mha", "nsa", "aiter", "wave", "ascend"), ANY),
    **dict.fromkeys(("intel_amx", "intel_xpu", "hybrid_linear_attn", "dual_chunk_flash_attn"), ANY),
}
_REASONING = ("qwen3", "glm45", "glm47", "kimi_k2", "mimo", "step3", "mistral", "ernie45", "minimax_m2")
_TOOLS = ("qwen3_coder", "glm45", "glm47", "kimi_k2", "mistral", "pythonic", "step3", "minimax_m2", "mimo")

MAPPED: dict[str, tuple[str, dict[str, str]]] = {
    "attention_backend": ("vllm_attention_backend", _ATTENTION),
    "moe_a2a_backend": (
        "vllm_all2all_backend",
        {
            "deepep": "deepep_high_throughput",
            "none": "allgather_reducescatter",
            **dict.fromkeys(("mooncake", "flashinfer", "ascend_fuseep"), ANY),
        },
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
        {
            **{name: name for name in _REASONING},
            "deepseek-r1": "deepseek_r1",
            "deepseek-v3": "deepseek_v3",
            "qwen3-thinking": "qwen3",
            "gpt-oss": "openai_gptoss",
            "minimax": "minimax_m2",
            "minimax-append-think": "minimax_m2_append_think",
        },
    ),
    "tool_call_parser": (
        "vllm_tool_call_parser",
        {
            **{name: name for name in _TOOLS},
            "qwen": "hermes",
            "qwen25": "hermes",
            "deepseekv3": "deepseek_v3",
            "deepseekv31": "deepseek_v31",
            "deepseekv32": "deepseek_v32",
            "gpt-oss": "openai",
            "llama3": "llama3_json",
            "minimax-m2": "minimax_m2",
        },
    ),
}
"""Flags with another name and other names for the values."""


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """Inverts reason -> flags in one text to flag -> reason."""
    return {name: why for why, names in table.items() for name in names.split()}


_ENGINE_DECIDES = {
    "vLLM always serves /metrics": "enable_metrics",
    "in vLLM it follows from --vllm-data-parallel-size": "enable_dp_attention",
    "vLLM decides itself how the parts of a layer are shared": (
        "enable_dp_lm_head moe_dense_tp_size attention_context_parallel_size"
    ),
    "vLLM's scheduler decides itself": (
        "schedule_policy schedule_conservativeness num_continuous_decode_steps disable_overlap_schedule "
        "enable_mixed_chunk max_prefill_tokens max_total_tokens max_queued_requests load_balance_method "
        "swa_full_tokens_ratio max_mamba_cache_size mamba_full_memory_ratio stream_interval sleep_on_idle "
        "mamba_scheduler_strategy mamba_radix_cache_strategy mamba_track_interval "
        "prefill_max_requests disable_hybrid_swa_memory enable_two_batch_overlap enable_single_batch_overlap "
        "tbo_token_distribution_threshold enable_pdmux"
    ),
    "vLLM chooses its kernels itself": (
        "prefill_attention_backend decode_attention_backend mm_attention_backend nsa_prefill_backend "
        "nsa_decode_backend sampling_backend grammar_backend moe_runner_backend fp8_gemm_backend "
        "fp8_gemm_runner_backend fp4_gemm_backend fp4_gemm_runner_backend bf16_gemm_backend "
        "mamba_backend linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "flashinfer_mla_disable_ragged enable_torch_compile torch_compile_max_bs enable_piecewise_cuda_graph "
        "piecewise_cuda_graph_max_tokens piecewise_cuda_graph_tokens disable_cuda_graph_padding "
        "enable_profile_cuda_graph triton_attention_num_kv_splits "
        "triton_attention_split_tile_size enable_flashinfer_allreduce_fusion "
        "enforce_disable_flashinfer_allreduce_fusion disable_flashinfer_autotune enable_nccl_nvls enable_symm_mem "
        "enable_mscclpp enable_torch_symm_mem enable_p2p_check deepep_config "
        "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion "
        "disable_chunked_prefix_cache enable_fused_qk_norm_rope enable_attn_tp_input_scattered "
        "enable_cudagraph_gc enable_layerwise_nvtx_marker speculative_attention_mode "
        "speculative_draft_attention_backend speculative_moe_runner_backend speculative_moe_a2a_backend"
    ),
    "vLLM does not move experts between GPUs here; answers are the same": (
        "enable_eplb eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
        "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location "
        "enable_expert_distribution_metrics expert_distribution_recorder_mode "
        "expert_distribution_recorder_buffer_size"
    ),
    "logs of the engines are in the run directory": (
        "log_level log_requests log_requests_level show_time_cost decode_log_interval crash_dump_folder "
        "enable_metrics_for_all_schedulers enable_trace otlp_traces_endpoint collect_tokens_histogram "
        "kv_events_config bucket_time_to_first_token bucket_inter_token_latency enable_cache_report"
    ),
    "the engine pool decides this itself": (
        "device base_gpu_id gpu_id_step nccl_port dist_init_addr dist_timeout nnodes node_rank numa_node "
        "warmups skip_server_warmup enable_memory_saver enable_weights_cpu_backup "
        "checkpoint_engine_wait_weights delete_ckpt_after_loading weight_loader_disable_mmap "
        "model_loader_extra_config update_weight_delta_chunk_bytes update_weight_delta_read_workers"
    ),
    "the engine pool watches engines: --rollout-health-check-timeout": (
        "watchdog_timeout soft_watchdog_timeout enable_nan_detection"
    ),
    "vLLM's prefix cache is on the GPU": (
        "enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy hicache_io_backend "
        "hicache_mem_layout hicache_storage_backend radix_eviction_policy enable_lmcache"
    ),
    "engines get and give tokens": (
        "skip_tokenizer_init stream_output tokenizer_worker_num detokenizer_worker_num "
        "disable_fast_image_processor keep_mm_feature_on_device enable_tokenizer_batch_encode "
        "disable_outlines_disk_cache constrained_json_whitespace_pattern file_storage_path tool_server"
    ),
}
ENGINE_DECIDES = _by_name(_ENGINE_DECIDES)
"""Flags without which the answers are the same. The value is the reason."""

_REFUSED = {
    "GPUs of one engine: --rollout-num-gpus-per-engine {}": ("tp tp_size tensor_parallel_size"),
    "stages of one engine: --vllm-pipeline-parallel-size {}": ("pp_size pipeline_parallel_size"),
    "engines serve --hf-checkpoint": ("model model_path"),
    "engines listen where the engine pool places them": ("host port api_key served_model_name"),
    "separate prefill servers are not supported yet; all engines do both": (
        "disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port "
        "disaggregation_ib_device disaggregation_decode_tp disaggregation_decode_dp pdlb_url"
    ),
    "--lora-rank and --target-modules train an adapter, --vllm-max-loras gives engines more slots": (
        "enable_lora lora_paths max_lora_rank lora_target_modules max_loras_per_batch lora_backend"
    ),
    "use --vllm-quantization": ("torchao_config quantization_param_path"),
    "vLLM computes logits in the dtype of the model; use --vllm-dtype float32": "enable_fp32_lm_head",
    "--sglang-enable-deterministic-inference asks for batch-invariant engines": "rl_on_policy_target",
    "answers would come from another distribution than the trainer's": "enable_custom_logit_processor",
    "sampling is set by --rollout-temperature, --rollout-top-p and --rollout-top-k": (
        "preferred_sampling_params sampling_defaults"
    ),
    "engines generate text from tokens": ("is_embedding enable_multimodal completion_template"),
    "drafted tokens are always accepted by the exact rule; leave the flag out": (
        "speculative_accept_threshold_single speculative_accept_threshold_acc"
    ),
    "vLLM drafts over the whole vocabulary": "speculative_token_map",
}
REFUSED = _by_name(_REFUSED)
"""Flags without a counterpart. The value is the other flag that decides or the reason; {} is the given value."""
