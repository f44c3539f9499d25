"""Checks the `--vllm-*` and `--router-*` flags with the parsers of vLLM and vllm-router.

The import of vLLM takes seconds, so vLLM is imported only for a `--vllm-*` flag that no earlier start of this user has
checked. A flag for a setting that this project sets itself (address, key, model, log-probs) is an error.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from slime import operators
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.memory.cards import Cards
from slime.models import family_for, read_decoder
from slime.models.lora import sends_adapters
from slime.models.vision import sees_images
from slime.plan.model_shape import Shape
from slime.plan.units import GIB
from slime.records.errors import FlagError
from slime.roles.groups import several_nodes, trainer_ranks
from slime.roles.served import count_policy_top_tokens, frozen_devices
from slime.system import extras
from slime.system.start_cache import StartCache
from slime.weight_sync.registry import CHANNELS
from vime.pool.engine_flags import (
    KEY,
    ROUTER_RESERVED,
    PrefixOwner,
    RaisingParser,
    common_settings,
    engine_tensor_parallel,
    requested_parallel,
)
from vime.vllm import fp8, versions
from vime.vllm.cpu import engine as cpu_engine
from vime.vllm.memory import sequence_bytes
from vime.vllm.server import SAMPLING
from vime.vllm.worker import adapter

_ADDRESS = "engines listen where the engine pool places them"
_NODES = "they follow from --rollout-num-gpus-per-engine and --num-gpus-per-node"
_MODEL = "engines serve --hf-checkpoint"
_IMAGES = "engines get the images that the processor of --hf-checkpoint has processed, as the trainer does"
_DRAFTS = "give this setting in --vllm-speculative-config"
_SAMPLING = "training needs the log-probs of the distribution that was sampled from"
VLLM_RESERVED = {
    "host": _ADDRESS,
    "port": _ADDRESS,
    "uds": _ADDRESS,
    "grpc": _ADDRESS,
    "headless": _ADDRESS,
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "config": "give its entries as --vllm-* flags or in --custom-config-path",
    "api_key": KEY,
    "middleware": KEY,
    "model": _MODEL,
    "model_tag": _MODEL,
    "served_model_name": _MODEL,
    "logprobs_mode": _SAMPLING,
    "generation_config": "sampling is set by --rollout-temperature, --rollout-top-p and --rollout-top-k",
    "weight_transfer_config": "weights arrive through --update-weight-transport",
    "worker_cls": "a run needs workers of its own; --vllm-worker-extension-cls adds methods to them",
    "mm_device_do_normalize": _IMAGES,
    "mm_processor_kwargs": _IMAGES,
    "trust_remote_code": "use --trust-remote-code",
    "enable_return_routed_experts": "use --use-rollout-routing-replay",
    "quantization_config": "use --vllm-quantization",
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
}
SMALL_MODEL, MANY_REQUESTS = 2 * 10**9, 512
"""Most parameters, and fewest requests per engine and rollout, for which a note recommends several engines per GPU.
Models of 0.5 and 1.5 G parameters gained; with 4 G, two engines were slower than one."""
MOST_GPUS = 4
"""The most GPUs per host in a measured run; see benchmarks/results."""


@functools.cache
def vllm_parser() -> argparse.ArgumentParser:
    """Returns the parser of vLLM's server. The import takes seconds. Raises ValueError when vLLM is not installed."""
    try:
        with versions.quiet_import():
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            class Parser(FlexibleArgumentParser):
                def error(self, message: str) -> NoReturn:
                    raise ValueError(message)

            make_parser: Callable[..., FlexibleArgumentParser] = Parser
            return versions.make_arg_parser(make_parser(allow_abbrev=False, add_help=False))
    except ImportError as error:
        raise FlagError(
            "vLLM", "be installed to check --vllm-* flags", error, f"install the extra: {extras.install()}"
        ) from error


@functools.cache
def router_parser() -> argparse.ArgumentParser:
    """Returns vllm-router's parser without address and workers. Raises ValueError when vllm-router is not installed."""
    try:
        from vllm_router.router_args import RouterArgs
    except ImportError as error:
        raise FlagError(
            "vllm-router",
            "be installed to check --router-* flags",
            error,
            f"install the extra: {extras.install()}",
        ) from error
    parser = RaisingParser(allow_abbrev=False, add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=True)
    return parser


VLLM = PrefixOwner(
    *("vllm_", "vLLM", "backend", VLLM_RESERVED, vllm_parser, SAMPLING),
    kept=StartCache("vllm-flags", versions.parser_fingerprint),
)
ROUTER = PrefixOwner("router_", "vllm-router", "router", ROUTER_RESERVED, router_parser)


def remarks(config: Config) -> Iterator[str]:
    """Yields notes on the engines, for the user. Raises ValueError when the installed vLLM is too old."""
    version = versions.installed()
    if config.num_engines and version is not None and (remark := versions.check(version)):
        yield remark
    if config.cluster.device == "cpu" and "gpu_memory_utilization" in config.engine.backend_args:
        yield (
            "--vllm-gpu-memory-utilization has no effect on CPU engines: --vllm-kv-cache-memory-bytes sets the size of "
            "their KV cache"
        )
    if config.cluster.device == "cpu" and config.engine.backend_env:
        yield "--vllm-batch-invariant has no effect on CPU engines: vLLM has it on GPUs alone"
    yield from fp8.remarks(config)
    yield from _engines_per_gpu(config)
    if several := several_nodes(config):
        yield f"{' and '.join(several)}: several hosts have not been run in this version"
    elif config.num_engines and config.nodes_per_engine > 1:
        yield (
            f"engines of {config.nodes_per_engine} nodes: run in this version as processes of one host, on CPUs, and "
            "not yet on several hosts"
        )
    elif config.cluster.device == "cuda":
        engine_gpus = 0 if config.cluster.colocate else config.cluster.rollout_num_gpus
        if (gpus := trainer_ranks(config) + engine_gpus + frozen_devices(config)) > MOST_GPUS:
            yield f"{gpus} GPUs: runs on more than {MOST_GPUS} of a host have not been made in this version"


def _engines_per_gpu(config: Config) -> Iterator[str]:
    """Yields a note if several engines per GPU would make the rollouts of this model faster."""
    c, count = config.cluster, 4
    several = max(c.rollout_engines_per_gpu, c.rollout_num_gpus_per_engine) > 1
    if c.device != "cuda" or not c.colocate or not config.num_engines or several:
        return
    requests = (config.data.rollout_batch_size or 0) * config.data.n_samples_per_prompt // config.num_engines
    hf = read_hf_config(config.rollout.hf_checkpoint)
    shape = Shape.of(hf)
    if requests < MANY_REQUESTS or shape.params > SMALL_MODEL:
        return
    cache = max(4, math.ceil(sequence_bytes(config, shape, hf) / GIB)) * GIB
    yield (
        f"--rollout-engines-per-gpu {count} --vllm-kv-cache-memory-bytes {cache} can make the rollouts of this small "
        "model faster (with 1,024 samples and 16 CPU cores 2.6 times for a 0.5B, and without a trainer 1.4 times for "
        "a 1.5B)"
    )


def check_engine_size(config: Config) -> None:
    """Checks that the parallel sizes given to vLLM multiply to --rollout-num-gpus-per-engine."""
    names = ("data_parallel_size", "pipeline_parallel_size")
    data, pipeline = (requested_parallel(config, name) or 1 for name in names)
    tensor = engine_tensor_parallel(config)
    if data * pipeline * tensor != config.cluster.rollout_num_gpus_per_engine:
        raise FlagError(
            "--rollout-num-gpus-per-engine",
            "equal the product of --vllm-tensor-parallel-size, --vllm-pipeline-parallel-size and "
            "--vllm-data-parallel-size",
            f"{config.cluster.rollout_num_gpus_per_engine} and {tensor} * {pipeline} * {data} = "
            f"{tensor * pipeline * data}",
        )


def check_engine_nodes(config: Config) -> None:
    """Checks an engine of several nodes. It runs in vLLM's multi-node mode, with one model over all its GPUs."""
    if not config.num_engines or config.nodes_per_engine == 1:
        return
    spread = f"an engine of {config.nodes_per_engine} nodes (--num-gpus-per-node {config.cluster.num_gpus_per_node})"
    if (backend := config.engine.backend_args.get("distributed_executor_backend", "mp")) != "mp":
        raise FlagError(
            "--vllm-distributed-executor-backend", f"be mp with {spread}", backend, "leave the flag out"
        )
    if (replicas := requested_parallel(config, "data_parallel_size") or 1) > 1:
        raise FlagError(
            "--vllm-data-parallel-size",
            f"be 1 with {spread}",
            replicas,
            "lower --rollout-num-gpus-per-engine, which gives more engines",
        )


def check_weight_channel(config: Config) -> None:
    """Checks that the weight channel and --check-weight-update-equal work with the engine's parallel sizes.

    A broadcast numbers the workers of an engine by their tensor-parallel rank. Data-parallel replicas and pipeline
    stages repeat these ranks, so a broadcast needs engines that are tensor parallel only. With the other channels, a
    worker needs no rank to find the files or the shared GPU memory. A pipeline stage loads only its own layers, but
    --check-weight-update-equal compares every tensor of an update on every worker.
    """
    data, pipeline = (
        requested_parallel(config, f"{name}_parallel_size") or 1 for name in ("data", "pipeline")
    )
    transport = config.weight_update.update_weight_transport
    if CHANNELS[transport].tensor_parallel_only and data * pipeline > 1:
        raise FlagError(
            f"--update-weight-transport {transport}",
            "go with engines that are tensor parallel only",
            f"--vllm-data-parallel-size {data} and --vllm-pipeline-parallel-size {pipeline}",
            "use disk, or more engines of fewer GPUs",
        )
    if config.weight_update.check_weight_update_equal and pipeline > 1:
        raise FlagError(
            "--check-weight-update-equal",
            "go with engines of one pipeline stage",
            f"--vllm-pipeline-parallel-size {pipeline}",
            "leave out one of the two",
        )


def check_context_length(config: Config) -> None:
    """Checks that --vllm-max-model-len, if given as a number, is at least the longest sequence of a rollout."""
    longest = config.rollout.rollout_max_context_len or config.rollout.rollout_max_response_len
    limit = config.engine.engine_facts.context
    if limit is not None and longest is not None and limit < longest:
        raise FlagError(
            "--vllm-max-model-len",
            "hold the longest rollout",
            f"{limit} for {longest} tokens",
            "raise it or lower --rollout-max-response-len",
        )


def check_architecture(config: Config) -> None:
    """Checks that the installed vLLM has the architecture of the checkpoint and reads its configuration."""
    checkpoint = config.rollout.hf_checkpoint
    if not config.num_engines:
        return
    kind = read_hf_config(checkpoint).get("model_type", "")
    if versions.misreads_sizes(kind):
        raise FlagError(
            "--hf-checkpoint",
            "have a configuration that the installed vLLM reads",
            f"{kind} in {checkpoint}, whose layers have heads of different sizes: vLLM {versions.installed()} fails "
            "with the installed transformers",
            "install a newer vLLM",
        )
    if name := versions.missing_architecture(kind):
        raise FlagError(
            "--hf-checkpoint",
            "have an architecture of the installed vLLM",
            f"{name} in {checkpoint}, which vLLM {versions.installed()} lacks",
            "install a newer vLLM, or use the checkpoint with its vision tower and --vllm-language-model-only",
        )


def require_deep_gemm(config: Config) -> None:
    """Checks that engines on this machine's GPUs can compute the indexers of sparse attention.

    Engines on CPUs run the model without indexers. If this machine has no GPU, like the head of some clusters, the
    engines are on other machines, whose packages may differ.
    """
    checkpoint = config.rollout.hf_checkpoint
    own = config.num_engines > 0 and not config.rollout.rollout_external_engine_addrs
    if not own or config.cluster.device != "cuda" or not versions.lacks_deep_gemm(read_hf_config(checkpoint)):
        return
    if len(Cards()):
        raise FlagError(
            "--hf-checkpoint",
            "have a model that vLLM computes on GPUs with the installed packages",
            f"sparse attention in {checkpoint}, whose indexers need DeepGEMM, which is not installed",
            "install the package deep_gemm for this GPU, or a wheel of vLLM that has a copy",
        )


def engine_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of every vLLM server, as fields of `vime.vllm.server.VllmSpec`. `vllm_argv` overrides the
    others."""
    on_cpu = config.cluster.device == "cpu"
    vision = (
        read_decoder(read_hf_config(config.rollout.hf_checkpoint)).vision if sees_images(config) else None
    )
    return common_settings(config) | {
        "vllm_argv": (*fp8.in_blocks(config.engine.backend_argv), *memory_share(config)),
        "sleeps": frees_memory(config),
        **adapter.settings(config),
        "bitwise": operators.bitwise(config),
        "fp8_scales": _fp8_scales(config),
        "reports_experts": config.off_policy.use_rollout_routing_replay,
        "top_tokens": count_policy_top_tokens(config),
        "keeps_cache": config.weight_update.flush_interval != 1,
        "cache_bytes": _cache_bytes(config),
        "whole_images": vision is not None and vision.sees_whole_image,
        # GPUs also serve frozen models of families that are not trained here
        "stateful": on_cpu and read_decoder(read_hf_config(config.rollout.hf_checkpoint)).stateful,
    }


def memory_share(config: Config) -> tuple[str, ...]:
    """Returns the flag that divides --vllm-gpu-memory-utilization among several engines of a GPU. vLLM does not start
    if less is free."""
    several, share = config.cluster.rollout_engines_per_gpu, config.engine.engine_facts.memory_share
    divided = several > 1 and config.cluster.device == "cuda"
    return ("--gpu-memory-utilization", f"{share / several:.4g}") if divided else ()


_OWN_VALUES = ("quantization", "speculative_config", "hf_overrides", "model_loader_extra_config")
"""vLLM's settings with which an engine may have values that no update brings."""


def starts_empty(config: Config) -> bool:
    """Returns True if each update brings every value with which an engine of this run computes.

    These are runs on GPUs with plain weights and without a vision tower, drafts or unmerged adapters. On CPUs, made-up
    values take as long as the checkpoint's. External engines start before the run, so they load the checkpoint.
    """
    hf = read_hf_config(config.rollout.hf_checkpoint)
    return (
        config.cluster.device == "cuda"
        and not config.debug.debug_rollout_only
        and not config.rollout.rollout_external_engine_addrs
        and not sends_adapters(config)
        and not any(name in config.engine.backend_args for name in _OWN_VALUES)
        and family_for(hf).scheme(hf) is None
        and read_decoder(hf).vision is None
    )


def _fp8_scales(config: Config) -> str | None:
    """Returns the scales with which the engine rounds as the trainer does, or None."""
    if "product" not in operators.bitwise(config) or not config.megatron.has_fp8_blocks:
        return None
    return "ue8m0" if config.megatron.force_fp8_ue8m0_scale else "float32"


def _cache_bytes(config: Config) -> int:
    """Returns the cache bytes of an engine on CPUs that runs all requests of a rollout at once."""
    checkpoint, batch = config.rollout.hf_checkpoint, config.data.rollout_batch_size
    longest = config.rollout.rollout_max_response_len or 0
    at_once = (batch or cpu_engine.MOST_REQUESTS) * config.data.n_samples_per_prompt
    return cpu_engine.cache_bytes(read_hf_config(checkpoint), longest, at_once)


def frees_memory(config: Config) -> bool:
    """Returns True if engines free their device memory while the trainer uses the device; see VllmEnginePool."""
    return config.cluster.colocate and config.cluster.device == "cuda"
