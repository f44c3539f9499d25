"""Defines the rules of devices, nodes, NVLink domains and offload."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

from slime.checkpoints.checkpoint_dir import is_hf_directory
from slime.config.fields import spelled
from slime.config.problems import require_value
from slime.config.schema import Config
from slime.hardware import HARDWARE
from slime.records.errors import FlagError
from slime.roles import CRITIC, get_roles
from slime.roles.critic import wanted_devices
from slime.roles.groups import build_groups, trainer_ranks
from slime.roles.served import served_models
from slime.weight_sync.registry import CHANNELS, default_channel

_FIX = "lower it, or set --nvlink-domain-size to what NVLink connects"


def check_hardware(c: Config) -> None:
    """Checks that --gpu comes with --device cuda, and that a node has room for its trainer ranks."""
    if c.cluster.gpu is None:
        return
    if c.cluster.device != "cuda":
        raise FlagError(
            "--gpu",
            "go with --device cuda",
            f"--gpu {c.cluster.gpu} and --device {c.cluster.device}",
            "leave out one",
        )
    for group in build_groups(c):
        ranks = group.config.cluster.actor_num_gpus_per_node
        if ranks > c.cluster.num_gpus_per_node:
            raise FlagError(
                f"--{group.flags}-num-gpus-per-node",
                f"be at most --num-gpus-per-node with --gpu {c.cluster.gpu}",
                f"{ranks} and {c.cluster.num_gpus_per_node}",
                f"use more nodes (--{group.flags}-num-nodes)",
            )


def check_parallel_sizes(c: Config) -> None:
    """Checks that each group of trainer ranks holds a whole number of models with TP * PP * CP ranks."""
    sizes = (
        c.megatron.tensor_model_parallel_size,
        c.megatron.pipeline_model_parallel_size,
        c.megatron.context_parallel_size,
    )
    for group in build_groups(c):
        nodes, ranks = group.config.cluster.actor_num_nodes, group.config.cluster.actor_num_gpus_per_node
        if group.ranks % math.prod(sizes):
            raise FlagError(
                f"--{group.flags}-num-nodes * --{group.flags}-num-gpus-per-node",
                "be a multiple of TP * PP * CP",
                f"{nodes} * {ranks} = {group.ranks} and {' * '.join(map(str, sizes))} = {math.prod(sizes)}",
            )


def check_critic_devices(c: Config) -> None:
    """Checks that a critic on the policy's ranks has the same number of ranks as the policy."""
    if CRITIC not in get_roles(c) or c.critic.critic_devices != "shared":
        return
    nodes, ranks = wanted_devices(c)
    if nodes * ranks != c.world_size:
        raise FlagError(
            "--critic-num-nodes * --critic-num-gpus-per-node",
            "equal --actor-num-nodes * --actor-num-gpus-per-node with --critic-devices shared",
            f"{nodes} * {ranks} and {c.cluster.actor_num_nodes} * {c.cluster.actor_num_gpus_per_node}",
            "leave the critic's out, or give --critic-devices own",
        )


def critic_notes(c: Config) -> Iterator[str]:
    """Yields notes on a critic whose counted ranks are the policy's, and on a run that trains only the critic."""
    alone, rollouts = c.critic.num_critic_only_steps, c.data.num_rollout
    if alone and CRITIC in get_roles(c) and rollouts is not None and alone >= rollouts:
        yield (
            f"--num-critic-only-steps {alone} with --num-rollout {rollouts}: the policy is never trained; give fewer, "
            "or --critic-train-only if that is meant"
        )
    counted = [name for name in ("critic_num_nodes", "critic_num_gpus_per_node") if c.get_value(name)]
    if counted and CRITIC in get_roles(c) and c.critic.critic_devices == "auto" and not CRITIC.devices(c):
        yield (
            f"{' and '.join(map(spelled, counted))}: as many ranks as the policy has, so the critic shares those of "
            "the policy, as in slime; --critic-devices own gives it devices of its own"
        )


def check_domains(c: Config) -> None:
    """Checks that every tensor-parallel group fits inside one NVLink domain, if the size of a domain is known."""
    if c.cluster.device != "cuda" or not (
        size := c.cluster.nvlink_domain_size or (c.cluster.gpu and HARDWARE[c.cluster.gpu].nvlink_domain)
    ):
        return
    trainers = trainer_ranks(c)
    engines = 0 if c.debug.debug_train_only else require_value(c.cluster.rollout_num_gpus)
    devices = trainers + engines - (min(c.world_size, engines) if c.cluster.colocate and trainers else 0)
    groups = {}
    if trainers:
        groups["--tensor-model-parallel-size"] = c.megatron.tensor_model_parallel_size
    if engines:
        groups["the tensor-parallel size of an engine (--rollout-num-gpus-per-engine)"] = (
            c.engine_tensor_parallel
        )
    for name, group in groups.items():
        if group > size:
            raise FlagError(name, "be at most the GPUs of an NVLink domain", f"{group} and {size}", _FIX)
        if devices > size and size % group:
            raise FlagError(
                name,
                "divide the GPUs of an NVLink domain where a run needs several",
                f"{group} and {size} = {size // group} x {group} + {size % group} with {devices} GPUs",
                _FIX,
            )


def check_offload(c: Config) -> None:
    """Checks that offload comes with --colocate: only processes that share devices can free memory for each other."""
    asked = {
        "--offload": c.cluster.offload,
        "--offload-train": c.cluster.offload_train,
        "--offload-rollout": c.cluster.offload_rollout,
    }
    set_flags = [name for name, value in asked.items() if value]
    if set_flags and not c.cluster.colocate:
        raise FlagError(
            set_flags[0],
            "come with --colocate",
            "it without",
            "trainer and engines have devices of their own",
        )
    if c.cluster.colocate and c.cluster.offload_rollout is False:
        raise FlagError(
            "--no-offload-rollout",
            "be left out with --colocate",
            "it",
            "engines sleep while the trainer works",
        )
    if c.cluster.offload and c.cluster.offload_train is False:
        raise FlagError("--offload", "not be combined with --no-offload-train", advice="leave one out")
    if c.cluster.offload_train_parts is not None and (
        not c.cluster.offload_train_parts or c.cluster.offload_train is False
    ):
        got = "no part" if not c.cluster.offload_train_parts else "--no-offload-train"
        raise FlagError(
            "--offload-train-parts", "name parts that may leave the device", got, "leave the flag out"
        )
    if c.cluster.offload_train_parts and not c.cluster.colocate:
        raise FlagError("--offload-train-parts", "come with --colocate", "it without", "leave it out")
    if c.cluster.colocate and c.cluster.offload_train and c.megatron.overrides.get("nccl_ub"):
        raise FlagError(
            "--offload-train",
            "not be combined with --nccl-ub, whose buffers are registered with NCCL",
            advice="leave one out",
        )


def check_engines(c: Config) -> None:
    """Raises ValueError unless the flags describe whole engines on whole nodes."""
    if c.debug.debug_rollout_only and c.debug.debug_train_only:
        raise FlagError("--debug-rollout-only", "not be combined with --debug-train-only", "both")
    if c.debug.debug_train_only:
        return
    if c.cluster.rollout_num_gpus is None:
        raise FlagError("--rollout-num-gpus", "be given when --colocate is not", "none")
    if c.cluster.rollout_num_gpus <= 0 or c.cluster.rollout_num_gpus % c.cluster.rollout_num_gpus_per_engine:
        raise FlagError(
            "--rollout-num-gpus",
            "be a positive multiple of --rollout-num-gpus-per-engine",
            f"{c.cluster.rollout_num_gpus} and {c.cluster.rollout_num_gpus_per_engine}",
        )
    size, node = c.cluster.rollout_num_gpus_per_engine, c.cluster.num_gpus_per_node
    if size > node and size % node:
        raise FlagError(
            "--rollout-num-gpus-per-engine",
            "be a multiple of --num-gpus-per-node when it is larger",
            f"{size} and {node}",
            f"use {size // node * node} or {(size // node + 1) * node}",
        )
    _check_engines_per_gpu(c)


def _check_engines_per_gpu(c: Config) -> None:
    """Checks engines that share a GPU: each uses no other GPU, has a given KV cache, and gets weights without NCCL.

    Without a given size, an engine would measure the GPU's free memory while the other engines start. NCCL refuses two
    ranks of a communicator on one GPU.
    """
    several, on_gpus = c.cluster.rollout_engines_per_gpu, c.cluster.device == "cuda"
    if several == 1:
        return
    flag, facts = "--rollout-engines-per-gpu", c.engine.engine_facts
    if (size := c.cluster.rollout_num_gpus_per_engine) > 1:
        got = f"{several} and --rollout-num-gpus-per-engine {size}"
        raise FlagError(flag, "be 1 for engines of several GPUs", got, "leave one of the two out")
    if c.rollout.rollout_external_engine_addrs:
        raise FlagError(flag, "be 1 with --rollout-external-engine-addrs", several, "list each engine there")
    if c.engine.prefill_num_servers:
        raise FlagError(flag, "be 1 with --prefill-num-servers", several, "leave one of the two out")
    if on_gpus and "cache_bytes" not in facts.flag_of:
        raise FlagError(flag, f"be 1 with engines of {facts.project}", several, "leave the flag out")
    if on_gpus and facts.cache_bytes is None:
        raise FlagError(
            f"{flag} {several}",
            f"come with {facts.flag('cache_bytes')}",
            "it without",
            "give the bytes of one engine's keys and values, for example 8589934592 (8 GiB)",
        )
    transport = c.weight_update.update_weight_transport
    if on_gpus and CHANNELS[transport].collective:
        raise FlagError(
            f"--update-weight-transport {transport}",
            "reach one engine per GPU",
            f"{flag} {several}",
            f"use {default_channel(None)}, or ipc with --colocate",
        )


def check_frozen_models(c: Config) -> None:
    """Checks that frozen models have whole engines, that engines larger than a node have whole nodes, and that the
    weights exist."""
    for model in (model for model in served_models(c) if model.frozen):
        size, node = model.devices_per_engine, c.cluster.num_gpus_per_node
        flag, each = (
            model.spelling.of("--rollout-num-gpus"),
            model.spelling.of("--rollout-num-gpus-per-engine"),
        )
        if size < 1 or model.devices < 1 or model.devices % size:
            raise FlagError(
                flag,
                f"be a multiple of {each}",
                f"{model.devices} and {size}",
                "each frozen model gets whole engines: take a multiple",
            )
        if size > node and size % node:
            raise FlagError(
                each,
                "be a multiple of --num-gpus-per-node when it is larger",
                f"{size} and {node}",
                f"use {size // node * node} or {(size // node + 1) * node}",
            )
        if not is_hf_directory(model.checkpoint):
            raise FlagError(
                model.spelling.of("--hf-checkpoint"),
                "name a Hugging Face directory",
                f"{model.checkpoint}, which has no config.json of a model",
                "check the path",
            )


def check_prefill(c: Config) -> None:
    """Checks that some engines remain for decoding."""
    prefill = c.engine.prefill_num_servers
    if prefill is not None and prefill >= c.num_engines:
        raise FlagError(
            "--prefill-num-servers",
            "be below the number of engines",
            f"{prefill} of {c.num_engines}",
            "the others write the answers: give more --rollout-num-gpus",
        )


def drop_prefill_engines(c: argparse.Namespace) -> None:
    """Drops the prefill engines of a run whose engines cannot pass keys and values to each other. The answers are the
    same without them."""
    several = c.rollout_num_gpus_per_engine > c.num_gpus_per_node
    where = (
        "--colocate on GPUs" if c.colocate and c.device == "cuda" else "engines of several nodes" * several
    )
    if c.prefill_num_servers and where:
        c.notes.append(
            f"--prefill-num-servers {c.prefill_num_servers} has no effect with {where}: each engine reads prompts and "
            "writes answers"
        )
        c.prefill_num_servers = None
