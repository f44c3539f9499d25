"""Defines the worker class of a run's engines on CPUs (vLLM's --worker-cls)."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_dp_group, get_ep_group
from vllm.v1.worker.cpu_worker import CPUWorker

from vime.vllm import patches
from vime.vllm.cpu import attention, draft, experts, rotary
from vime.vllm.cpu.memory import drop_pages, trim
from vime.vllm.worker.columns import routed_experts
from vime.vllm.worker.workers import RunWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class CpuWorker(RunWorker, CPUWorker):
    """Extends vLLM's worker on CPUs. It returns each token's experts, exchanges the tokens of replicas that share
    experts, and returns the memory of its key-value cache to the system."""

    collector: Any = None
    """vLLM's collector of experts. None for an engine whose answers have no experts."""
    scheduled: dict[str, int]
    """Number of tokens per request in the running step."""

    def register(self, vllm_config: VllmConfig) -> None:
        """Registers the base class's parts and applies the patches of a worker on CPUs.

        Operators of --rlk-bitwise are registered first, because the registry keeps the first class of a name.
        """
        patches.apply("worker on CPUs")
        super().register(vllm_config)
        rotary.register()
        draft.register()
        if vllm_config.model_config.is_mm_prefix_lm:
            attention.register()
        if hasattr(vllm_config.model_config.hf_config, "index_topk"):
            from vime.vllm.cpu import sparse_attention  # imports vLLM's model of DeepSeek-V3

            sparse_attention.register(vllm_config.model_config.hf_config.architectures)
        if vllm_config.quant_config is not None:
            from vime.vllm.cpu import quantized  # imports vLLM's methods of quantisation

            quantized.take_plain_experts(vllm_config)

    def init_device(self) -> None:
        """Initialises the device, and lets the groups of ranks that share experts exchange tokens."""
        super().init_device()
        for group in (get_dp_group(), get_ep_group()) if self.model_config.is_moe else ():
            communicator: Any = group.device_communicator
            if communicator is not None:
                communicator.all_gatherv = MethodType(experts.all_gatherv, communicator)
                communicator.reduce_scatterv = MethodType(experts.reduce_scatterv, communicator)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the key-value cache and the collector of experts."""
        super().initialize_from_config(kv_cache_config)
        if self.settings.routed_experts and not self.use_v2_model_runner:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self.collector = get_aux_output_connector(self.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Computes a step's logits."""
        if self.collector is not None:
            self.collector.begin_step(scheduler_output.aux_output_connector_metadata)
            self.scheduled = scheduler_output.num_scheduled_tokens
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Samples a step's tokens. The output holds the experts of the step's tokens."""
        output: Any = super().sample_tokens(grammar_output)
        if self.collector is not None and output is not None:
            output.aux_output_connector_output = routed_experts.step_rows(
                self.collector, self.model_runner, self.scheduled, output
            )
        return output

    def return_memory(self) -> None:
        """Returns memory to the system: the pages of the key-value cache, which must be empty, and memory that the
        process has freed."""
        drop_pages(self.model_runner.kv_caches)
        trim()
