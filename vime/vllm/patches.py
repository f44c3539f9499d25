"""Lists every symbol of vLLM that this project replaces. The import is light: the functions that need vLLM load it.

Workers are classes of this project (vLLM's --worker-cls), layers and kernels are in vLLM's registries, and weights come
through its WeightTransferEngine. The records below have no such extension point. A server that is not part of a run
applies no patch.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from slime import bridges
from slime.bridges import Patch
from vime.vllm.versions import installed

PATCHES = {
    "server": (
        Patch(
            symbol="vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request",
            replacement="vime.vllm.worker.compact_log_probs:without_text",
            condition="in each process of a server",
            why="vLLM decodes the text of each token beside its log-prob, which takes 22 us per token of the one "
            "process that serves HTTP; our client reads numbers only",
            removed_when="a request can ask for log-probs without text",
        ),
        Patch(
            symbol="vllm.v1.serial_utils:MsgpackEncoder.encode_into",
            replacement="vime.vllm.worker.merged_log_probs:merging",
            condition="in each process of a server",
            why="vLLM packs three arrays per request and step; three arrays per step are packed faster",
            removed_when="vLLM sends the log-probs of a step as one record",
        ),
        Patch(
            symbol="vllm.v1.serial_utils:MsgpackDecoder.decode",
            replacement="vime.vllm.worker.merged_log_probs:splitting",
            condition="in each process of a server",
            why="it undoes what encode_into merged",
            removed_when="vLLM sends the log-probs of a step as one record",
        ),
    ),
    "server, at its first request": (
        Patch(
            symbol="vllm.v1.engine.output_processor:RequestState._new_completion_output",
            replacement="vime.vllm.worker.columns.token_versions:with_spans",
            condition="in the process that serves HTTP, at its first request",
            why="an answer must contain the version of the weights that sampled each token",
            removed_when="vLLM 0.26 is no longer supported: newer versions have CompletionOutput.weight_versions",
        ),
    ),
    "server on CPUs": (
        Patch(
            symbol="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
            replacement="vime.vllm.cpu.engine:keeping_the_start_method",
            condition="in each process of a server on CPUs",
            why="vLLM starts the engine's process with spawn, and its imports then take 7 s; our server loads the "
            "OpenMP library for which vLLM needs spawn, so it can fork",
            removed_when="vLLM's CPU platform keeps the start method of the environment",
        ),
        Patch(
            symbol="vllm.config:VllmConfig._verify_aux_output_compatibility",
            replacement="vime.vllm.worker.columns.routed_experts:for_the_older_runner",
            condition="in each process of a server on CPUs",
            why="vLLM refuses --enable-return-routed-experts with the older model runner, whose experts our worker "
            "returns",
            removed_when="the newer model runner works on CPUs without Triton",
            versions=">=0.27",
        ),
        Patch(
            symbol="sys:meta_path",
            replacement="vime.vllm.cpu.vision:with_finder",
            condition="in each process of a server on CPUs, without torchvision",
            why="vLLM's modules of Qwen's models and of Gemma 3 import torchvision through transformers",
            removed_when="those modules of transformers import torchvision lazily",
        ),
    ),
    "worker on CPUs": (
        Patch(
            symbol="vllm._custom_ops:create_onednn_mm",
            replacement="vime.vllm.cpu.memory:with_few_kernels",
            condition="in a worker on CPUs",
            why="each layer keeps 32 kernels of 0.3 MiB, and an engine grows for hundreds of steps",
            removed_when="vLLM has a setting for the size of that cache",
        ),
        Patch(
            symbol="vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",
            replacement="vime.vllm.cpu.experts:with_map",
            condition="in a worker on CPUs",
            why="the kernel expects all experts in its own process, but ranks may share experts",
            removed_when="the kernel takes an expert map",
            versions=">=0.27",
        ),
        Patch(
            symbol="vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter.__init__",
            replacement="vime.vllm.cpu.experts:with_one_group",
            condition="in a worker on CPUs",
            why="the router takes sigmoid scores only with groups of experts",
            removed_when="the router takes sigmoid scores without groups",
            versions=">=0.27",
        ),
        Patch(
            symbol="vllm.model_executor.kernels.linear:_POSSIBLE_FP8_BLOCK_KERNELS",
            replacement="vime.vllm.cpu.fp8:with_plain_kernel",
            condition="in a worker on CPUs",
            why="vLLM's kernels for blocks of fp8 on CPUs need AMX",
            removed_when="vLLM has a kernel without AMX, or a public registry of kernels",
            versions=">=0.27",
        ),
    ),
    "bitwise worker": (
        Patch(
            symbol="vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
            replacement="vime.vllm.worker.bitwise.sampling:target_log_probs",
            condition="in a worker with --rlk-bitwise",
            why="log-probs must have the bits of the trainer's",
            removed_when="vLLM has a registry of samplers",
        ),
        Patch(
            symbol="vllm.v1.worker.gpu.sample.prompt_logprob:compute_token_logprobs",
            replacement="vime.vllm.worker.bitwise.sampling:target_log_probs",
            condition="in a worker with --rlk-bitwise",
            why="log-probs of prompts must have the bits of the trainer's",
            removed_when="vLLM has a registry of samplers",
            versions=">=0.27",
        ),
        Patch(
            symbol="vllm.v1.worker.gpu.sample.states:apply_temperature",
            replacement="vime.vllm.worker.bitwise.sampling:exact_temperature",
            condition="in a worker with --rlk-bitwise",
            why="vLLM's kernel does not promise a correctly rounded quotient",
            removed_when="vLLM has a registry of samplers",
        ),
        Patch(
            symbol="vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params",
            replacement="vime.vllm.worker.bitwise.sampling:in_float32",
            condition="in a worker with --rlk-bitwise",
            why="vLLM divides logits by the temperature in bfloat16, which rounds the quotient",
            removed_when="vLLM has a registry of samplers",
        ),
    ),
}
"""Patches that are applied together, per condition."""


def apply(condition: str) -> None:
    """Applies the patches of a condition that the installed version needs. A repeated call does nothing.

    A patch with a range of versions is skipped if its symbol does not exist, because only two versions were run. Raises
    RuntimeError if the symbol of another patch does not exist.
    """
    version = installed() or ""
    for patch in PATCHES[condition]:
        is_needed = SpecifierSet(patch.versions).contains(version, prereleases=True)
        if is_needed and (not patch.versions or bridges.exists(patch)):
            bridges.apply(patch)
