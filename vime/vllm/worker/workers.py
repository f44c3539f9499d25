"""Defines the worker class of a run's engines on GPUs (vLLM's --worker-cls), and the base class that it shares with the
worker on CPUs (vime.vllm.cpu.worker)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.utils.flashinfer import has_flashinfer
from vllm.v1.worker.gpu_worker import Worker

from vime.vllm.versions import file_init_method
from vime.vllm.worker import bitwise, shared_gpu
from vime.vllm.worker.settings import EngineSettings

if TYPE_CHECKING:
    from vime.vllm.worker.weight_receiver import VimeWeightTransferEngine

    _Base = Worker
else:
    _Base = object

# vLLM's own logger prints the messages of loggers below it.
logger = logging.getLogger("vllm.vime.workers")

_DELTA_KERNEL = "gdn_prefill_backend"
"""Name in vLLM's --additional-config under which vLLM keeps the value of --gdn-prefill-backend."""


class RunWorker(_Base):
    """Base of a worker that waits for its device, hands its draft model to the receiver of weights, and keeps an
    adapter that an update brought.

    `settings` has the engine's settings.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        self.settings = EngineSettings.take(vllm_config)
        self.register(vllm_config)
        address = file_init_method(distributed_init_method, vllm_config.parallel_config.world_size)
        super().__init__(vllm_config, local_rank, rank, address, is_driver_worker)

    def register(self, vllm_config: VllmConfig) -> None:
        """Registers the classes of this project with vLLM, before vLLM builds the model."""
        if self.settings.bitwise:
            bitwise.register(self.settings.bitwise, self.settings.fp8_scales)

    def init_device(self) -> None:
        """Takes the device once the gate is open."""
        if self.settings.gate is not None:
            shared_gpu.wait_for(self.settings.gate)
        super().init_device()
        if "head" in self.settings.bitwise:
            bitwise.use_log_probs(self.model_runner)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model, whose logits are then divided by the temperature of the settings."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        bitwise.adapt(self.get_model(), self.settings.bitwise)
        if self.settings.temperature != 1:
            divide_logits(self.get_model(), self.settings.temperature)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the device. Other processes may take memory there at the same time."""
        with shared_gpu.allow_other_memory_use():
            super().sleep(level)

    @property
    def _receiver(self) -> VimeWeightTransferEngine:
        return cast("VimeWeightTransferEngine", self.weight_transfer_engine)

    def start_weight_update(self, *args: object, **kwargs: object) -> None:
        """Starts an update and passes the draft model to its receiver, because vLLM creates the receiver with the model
        only."""
        draft = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        self._receiver.draft = draft if isinstance(draft, nn.Module) else None
        super().start_weight_update(*args, **kwargs)

    def finish_weight_update(self, *args: object, **kwargs: object) -> None:
        """Ends an update and keeps an adapter that the update brought.

        Newer versions of vLLM drop all adapters at this point, because the base may have changed. Here, an update that
        brings an adapter does not change the base.
        """
        runner: Any = self.model_runner
        if self._receiver.brings_adapter and hasattr(runner, "reset_lora_state"):
            runner.reset_lora_state = _keep
        super().finish_weight_update(*args, **kwargs)


class GpuWorker(RunWorker, Worker):
    """vLLM's worker on a GPU."""

    def register(self, vllm_config: VllmConfig) -> None:
        """Chooses the kernel of gated delta nets, and registers the classes of this project."""
        choose_delta_kernel(vllm_config)
        super().register(vllm_config)


def choose_delta_kernel(config: VllmConfig) -> None:
    """Chooses vLLM's Triton kernel for the prompts of gated delta nets where vLLM finds no flashinfer.

    By default, vLLM chooses flashinfer's kernel by the GPU's generation alone and fails at the first prompt. A kernel
    that the user chose with --vllm-gdn-prefill-backend stays.
    """
    more: object = config.additional_config
    if not hasattr(config.model_config.hf_text_config, "linear_key_head_dim") or not isinstance(more, dict):
        return
    if more.get(_DELTA_KERNEL, "auto") == "auto" and not has_flashinfer():
        config.additional_config = {**more, _DELTA_KERNEL: "triton"}
        logger.info("gated delta nets compute prompts in Triton, because vLLM finds no flashinfer")


def divide_logits(model: nn.Module, temperature: float) -> None:
    """Divides the logits of a model of vLLM by `temperature`. Raises ValueError for a model without logits.

    vLLM computes log-probs of a prompt from unscaled logits, whatever the request's temperature. A teacher scores at
    the temperature of the policy's samples, so its server scales the logits themselves.
    """
    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not found:
        raise ValueError(
            f"a model must have logits to be served at temperature {temperature}, got {type(model).__name__}, which "
            "computes none; serve a causal language model"
        )
    for module in found:
        module.scale /= temperature  # vLLM multiplies by the scale after the soft cap


def _keep() -> None:
    """Replaces a model runner's `reset_lora_state` and does nothing."""
