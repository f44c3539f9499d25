"""Defines the flags of SGLang and sglang-router, and the checks of a configuration with SGLang engines.

An engine gets `--sglang-NAME` as `--NAME`. SGLang itself checks these flags when it starts. The parser of sglang-router
checks `--router-*`. A flag for a setting that this project chooses is an error.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util

from slime.config import Config, FlagGroup
from slime.config.fields import FlagSpec
from slime.config.problems import Problems
from slime.config.unsupported import Unsupported
from slime.models.lora import sends_adapters
from slime.records.errors import FlagError
from vime.pool.engine_flags import (
    DEADLINE,
    KEY,
    ROUTER_RESERVED,
    SLIME_ROUTER_FLAGS,
    WITHOUT_ROUTER,
    PrefixOwner,
    RaisingParser,
)
from vime.sglang.control import CHANNEL
from vime.sglang_api import config_file

_ADDRESS = "engines listen where the engine pool places them"
_MODEL = "engines serve --hf-checkpoint"
_SIZE = "an engine splits each layer over its --rollout-num-gpus-per-engine GPUs, and has no other parallelism here"
RESERVED = {
    **dict.fromkeys(("host", "port", "nccl_port", "grpc_mode", "smg_grpc_mode"), _ADDRESS),
    **dict.fromkeys(("api_key", "admin_api_key"), KEY),
    **dict.fromkeys(("model_path", "model", "weight_version"), _MODEL),
    **dict.fromkeys(("tp_size", "tp", "tensor_parallel_size", "pp_size", "pipeline_parallel_size"), _SIZE),
    **dict.fromkeys(("dp_size", "dp", "data_parallel_size", "nnodes", "node_rank", "dist_init_addr"), _SIZE),
    "config": "give the flags themselves",
    "device": "use --device",
    "trust_remote_code": "use --trust-remote-code",
    "skip_tokenizer_init": "the answers must have their text",
}
CONCURRENCY = FlagSpec(
    "sglang_server_concurrency", int, 512, "maximum number of requests in flight per engine"
)
ROUTER_PORT = FlagSpec("sglang_router_port", int, None, "port of the run's own sglang-router")
UNSUPPORTED = {
    "sglang_router_ip": Unsupported(
        None, "with --rollout-backend sglang, the run starts its own sglang-router"
    ),
    **SLIME_ROUTER_FLAGS,
}
NO_EFFECT = {
    "sglang_router_request_timeout_secs": FlagSpec("sglang_router_request_timeout_secs", str, None, DEADLINE),
    **WITHOUT_ROUTER,
}
RENAMED = {"sglang_router_policy": "router_policy"}


@functools.cache
def router_parser() -> argparse.ArgumentParser:
    """Returns sglang-router's parser, without the options for its address and workers. Raises ValueError if
    sglang-router is not installed."""
    try:
        from sglang_router.router_args import RouterArgs
    except ImportError as error:
        raise FlagError(
            "sglang-router", "be installed to check --router-* flags", error, "pip install sglang-router"
        ) from error
    parser = RaisingParser(allow_abbrev=False, add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False, exclude_host_port=True)
    return parser


ROUTER = PrefixOwner("router_", "sglang-router", "router", ROUTER_RESERVED, router_parser)


class _AsTheyStand:
    """The owner of `--sglang-*`. It fills `backend_args` with the values as the user typed them (True for a switch),
    and `backend_argv` with the flags without their prefix."""

    prefix = "sglang_"

    def parse(self, groups: list[FlagGroup]) -> dict[str, object]:
        values: dict[str, object] = {}
        argv: dict[str, list[str]] = {}
        problems = Problems()
        for group in groups:
            problems.check(self._take, group, values, argv, origin=group.origin)
        problems.report()
        return {
            "backend_args": values,
            "backend_argv": [token for tokens in argv.values() for token in tokens],
        }

    def _take(self, group: FlagGroup, values: dict[str, object], argv: dict[str, list[str]]) -> None:
        name = group.name.removeprefix(self.prefix)
        if name in RESERVED:
            raise FlagError(group.typed, "be left out", advice=RESERVED[name])
        values[name] = group.values[0] if len(group.values) == 1 else group.values or True
        argv[name] = [f"--{name.replace('_', '-')}", *group.values]


SGLANG = _AsTheyStand()


def translate(groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
    """Returns the flags and notes for the user. The file of --sglang-config is replaced by its flags, and slime's
    router flags get the router's own names. Raises ValueError for flags of vLLM."""
    _require_sglangs(groups)
    made, notes = config_file.expand(groups, lambda frozen_groups: translate(frozen_groups)[0])
    _require_sglangs(made)
    for index, group in enumerate(made):
        if group.name in RENAMED:
            typed = "--" + RENAMED[group.name].replace("_", "-")
            made[index] = FlagGroup(typed, RENAMED[group.name], group.values)
            notes.append(f"{group.typed} becomes {typed}")
    return made, notes


def _require_sglangs(groups: list[FlagGroup]) -> None:
    problems = Problems()
    for group in groups:
        if group.name.startswith("vllm_"):
            problems.add(
                FlagError(
                    group.typed,
                    "be left out with --rollout-backend sglang",
                    advice="it is a flag of vLLM: use --sglang-*",
                )
            )
    problems.report()


def check_concurrency(config: Config) -> None:
    """Raises ValueError unless --sglang-server-concurrency is above 0."""
    if config.engine.server_concurrency <= 0:
        raise FlagError(
            "--sglang-server-concurrency",
            "be above 0",
            config.engine.server_concurrency,
            "give the number of requests that an engine may have",
        )


def check_prefill(config: Config) -> None:
    """Raises ValueError for --prefill-num-servers, because only vLLM's engines can pass prompts to each other."""
    if config.engine.prefill_num_servers:
        raise FlagError(
            "--prefill-num-servers",
            "be left out with --rollout-backend sglang",
            config.engine.prefill_num_servers,
            "only vLLM's engines pass prompts to each other",
        )


def check_weights(config: Config) -> None:
    """Raises ValueError for weight updates that SGLang's engines do not support. They need full weights in files, and
    GPUs that the trainer does not use."""
    if not config.num_engines:
        return
    transport = config.weight_update.update_weight_transport
    if transport != CHANNEL:
        raise FlagError(
            "--update-weight-transport",
            f"be {CHANNEL} with --rollout-backend sglang",
            transport,
            f"add --update-weight-transport {CHANNEL}",
        )
    if config.weight_update.update_weight_mode == "delta":
        raise FlagError(
            "--update-weight-mode", "be full with --rollout-backend sglang", "delta", "leave the flag out"
        )
    if config.weight_update.flush_interval != 1:
        raise FlagError(
            "--flush-cache-interval",
            "be 1 with --rollout-backend sglang",
            config.weight_update.flush_cache_interval,
            "SGLang drops its cache with each update",
        )
    if sends_adapters(config):
        raise FlagError(
            "--lora-merge",
            f"be given with --lora-rank {config.lora.lora_rank} and --rollout-backend sglang",
            "none",
            "SGLang gets whole weights",
        )
    if config.cluster.colocate and config.cluster.device == "cuda":
        raise FlagError(
            "--colocate on GPUs",
            "go with --rollout-backend vllm",
            "sglang",
            "give the engines their own GPUs",
        )
    if config.weight_update.check_weight_update_equal:
        raise FlagError(
            "--check-weight-update-equal", "go with --rollout-backend vllm", "sglang", "leave the flag out"
        )


def check_engines(config: Config) -> None:
    """Raises ValueError for a setting that SGLang's engines do not support in this project."""
    if config.off_policy.replay_kept_tokens:
        raise FlagError(
            "--replay-kept-tokens",
            "go with --rollout-backend vllm",
            "sglang",
            "its answers do not have the tokens that top-p kept: leave the flag out",
        )
    if config.algorithm.use_score_centering:
        raise FlagError(
            "--use-score-centering",
            "go with --rollout-backend vllm",
            "sglang",
            "its answers do not have the likeliest tokens: leave the flag out",
        )
    if config.off_policy.use_rollout_routing_replay:
        raise FlagError(
            "--use-rollout-routing-replay",
            "go with --rollout-backend vllm",
            "sglang",
            "sglang-router drops the request for experts: use --use-routing-replay",
        )
    if config.num_engines and config.nodes_per_engine > 1:
        raise FlagError(
            "--rollout-num-gpus-per-engine",
            "be at most --num-gpus-per-node with --rollout-backend sglang",
            f"{config.cluster.rollout_num_gpus_per_engine} and {config.cluster.num_gpus_per_node}",
            "take smaller engines",
        )


def require_installed(config: Config) -> None:
    """Raises ValueError unless sglang-router is installed, and SGLang if the run starts engines itself."""
    if not config.num_engines:
        return
    needed = {"sglang_router": "sglang-router"}
    if not config.rollout.rollout_external_engine_addrs:
        needed["sglang"] = "sglang"
    for module, package in needed.items():
        if importlib.util.find_spec(module) is None:
            other = ", or name engines by --rollout-external-engine-addrs" if module == "sglang" else ""
            raise FlagError(
                "--rollout-backend sglang",
                f"find {package}",
                "none installed",
                f"pip install {package}{other}",
            )
