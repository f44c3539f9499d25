"""Runs a real vLLM in this process. It takes published weights as an engine does and returns the log-probs of a
prompt. With several workers, each worker has its own process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import make_checkpoint, publish_checkpoint
from transformers import DeepseekV3Config

from slime import bridges
from vime.vllm import patches
from vime.vllm.cpu.offline import ENVIRONMENT, SETTINGS, WORKER, OfflineEngine

GPU_SHARE = 0.1
"""Share of a GPU's memory for vLLM, because other tests use the GPU too. vLLM does not start if less is free."""


def leave_what_is_there(patch: pytest.MonkeyPatch) -> None:
    """Keeps the garbage collector away from the imported objects. vLLM would undo this with each engine and start
    nine collections of half a second per engine."""
    gc.collect()  # nothing collects the engine before once it is frozen
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        patch.setattr(gc, name, lambda: None)


@contextmanager
def plain_matrices(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of this process keep plain matrices on a CPU too: products and head are those of --rlk-bitwise."""
    from vllm.model_executor.custom_op import op_registry_oot

    from vime.vllm.worker.bitwise import layers

    kept = dict(op_registry_oot)
    layers.register({"product", "head"})
    try:
        yield
    finally:
        op_registry_oot.clear()
        op_registry_oot.update(kept)


@contextmanager
def offline_engine(
    checkpoint: Path, weight_dir: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Iterator[OfflineEngine]:
    """Starts vLLM in fp32, unless `settings` (vLLM's own) have another dtype. Update files are in `weight_dir`."""
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("VIME_WEIGHT_DIR", str(weight_dir))
    # restores the function that vLLM replaces
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)
    # For Kimi K2, vLLM changes the model_type of transformers' class, and later checkpoints would be saved under it.
    monkeypatch.setattr(DeepseekV3Config, "model_type", DeepseekV3Config.model_type)
    from vllm import LLM
    from vllm.compilation import decorators
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # vLLM's transformers backend would change classes of transformers, with which other tests of this process compute.
    mark = decorators._support_torch_compile
    monkeypatch.setattr(
        decorators,
        "_support_torch_compile",
        lambda cls, *given, **named: (
            cls if cls.__module__.startswith("transformers.") else mark(cls, *given, **named)
        ),
    )

    # vLLM inspects a model's class in a process that imports vLLM again. This process imports the class anyway.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())

    for patch in patches.PATCHES["server on CPUs"]:
        if patch.symbol == "sys:meta_path":  # models with images import torchvision
            bridges.apply(patch)
    leave_what_is_there(monkeypatch)
    on_gpu = {"gpu_memory_utilization": GPU_SHARE} if torch.cuda.is_available() else {}
    # Nothing is compiled, as in a server of a run on CPUs. A trainer of an earlier test redirects requests for a CUDA
    # device of this process to the CPU, and the compiler reads the properties of the current device.
    stack = ExitStack()
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    llm = None
    try:
        llm = LLM(str(checkpoint), **{**SETTINGS, **on_gpu, **settings})
        yield OfflineEngine(llm)
    finally:
        stack.close()
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()  # an engine that did not start also leaves its process group


def started(root: Path, patch: pytest.MonkeyPatch, *, tied: bool) -> Iterator[Any]:
    """Yields vLLM's worker with a tiny model; its `update(version)` returns the update that the trainer published."""
    checkpoint = make_checkpoint(root / "first", seed=0, tied=tied)
    other = make_checkpoint(root / "second", seed=1, tied=tied)
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    patch.setenv("VLLM_HOST_IP", "127.0.0.1")
    patch.setenv("VIME_WEIGHT_DIR", str(root / "weights"))
    patch.setattr(torch, "set_num_threads", torch.set_num_threads)  # restores the function that vLLM replaces
    from vllm import LLM

    leave_what_is_there(patch)
    stance = torch.compiler.set_stance("force_eager")  # nothing is compiled from here on, see offline_engine
    llm = LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        weight_transfer_config={"backend": "vime"},
        worker_cls=WORKER,
        disable_log_stats=True,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    worker.update = lambda version: publish_checkpoint(
        other if version % 2 else checkpoint, root / "weights", version, checksums=True
    )
    worker.tied = tied
    with stance:
        yield worker
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
