"""Settings of TRL and verl for their vLLM engines, in the flags of this backend."""

from __future__ import annotations

from slime.config.peer_names import TRL, VERL, table_of

_ROLLOUT = "actor_rollout_ref.rollout"
VLLM_PEER_NAMES = {
    **table_of(
        TRL,
        (
            ("vllm_mode", "--colocate", "for the mode colocate; otherwise --rollout-num-gpus"),
            ("vllm_max_model_length", "--vllm-max-model-len", ""),
            ("vllm_importance_sampling_correction", "--use-tis", ""),
            ("vllm_importance_sampling_cap", "--tis-clip", "with --use-tis"),
            (
                "vllm_server_base_url",
                "--rollout-external-engine-addrs",
                "the run starts its own engines without it",
            ),
            (
                "vllm_server_host",
                "--rollout-external-engine-addrs",
                "the run starts its own engines without it",
            ),
        ),
    ),
    **table_of(
        VERL,
        (
            (f"{_ROLLOUT}.gpu_memory_utilization", "--vllm-gpu-memory-utilization", ""),
            (f"{_ROLLOUT}.max_model_len", "--vllm-max-model-len", ""),
            (f"{_ROLLOUT}.max_num_seqs", "--vllm-max-num-seqs", ""),
        ),
    ),
}
