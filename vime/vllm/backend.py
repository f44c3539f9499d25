"""The rollout backend of vLLM behind vllm-router: its flags, its rules, the facts about its engines, and their start.

The import is light: the functions that need vLLM, Ray or torch import them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime.config import Config, FlagGroup
from slime.config.fields import FlagSpec
from slime.config.sections.engine import EngineFacts
from slime.protocols import WeightSource
from slime.records.errors import FlagError
from slime.roles.served import ServedModel
from slime.rules.listing import Row
from vime.pool import external
from vime.pool.engine_flags import (
    DEADLINE,
    SLIME_ROUTER_FLAGS,
    WITHOUT_ROUTER,
    check_engine_heads,
    engine_dtype,
)
from vime.pool.engine_server import option, pair_up
from vime.sglang_api.translate_flags import PREFIX, targets, translate_sglang
from vime.vllm import fp8, versions
from vime.vllm import server_flags as flags
from vime.vllm.caches.flags import check_prefill_engines, require_connector
from vime.vllm.peer_names import VLLM_PEER_NAMES
from vime.vllm.quantized.machines import check_cpu
from vime.vllm.quantized.rules import check_quantized_checkpoint
from vime.vllm.server import VllmServer, VllmSpec
from vime.vllm.worker.adapter import adapter_name

if TYPE_CHECKING:
    from slime.cluster.placement import Placement
    from slime.protocols import EnginePool


def int_or_auto(text: str) -> int | str:
    """Parses the value of --vllm-server-concurrency."""
    return text if text == "auto" else int(text)


ENGINE_SHARE = 0.92
"""Default of vLLM's --gpu-memory-utilization."""
CONCURRENCY = FlagSpec(
    "vllm_server_concurrency",
    int_or_auto,
    512,
    "maximum number of requests in flight per engine; auto starts with 512, rises while requests start at once, and "
    "falls when they wait in the engines or are preempted",
)
INVARIANT = FlagSpec(
    "vllm_batch_invariant",
    bool,
    False,
    "answers that do not depend on the other requests of a batch (slower)",
)
ROUTER_IP = FlagSpec("vllm_router_ip", str, None, "address of an external router")
ROUTER_PORT = FlagSpec(
    "vllm_router_port",
    int,
    None,
    "port of that router; without --vllm-router-ip, port of the run's own router",
)
NO_EFFECT = {
    "vllm_router_request_timeout_secs": FlagSpec("vllm_router_request_timeout_secs", str, None, DEADLINE),
    "vllm_weight_sync_mode": FlagSpec(
        "vllm_weight_sync_mode", str, None, "--update-weight-transport chooses how weights reach the engines"
    ),
    **WITHOUT_ROUTER,
}
FLAG_NAMES = {
    "memory_share": "--vllm-gpu-memory-utilization",
    "cache_bytes": "--vllm-kv-cache-memory-bytes",
    "context": "--vllm-max-model-len",
    "media_limits": "--vllm-limit-mm-per-prompt",
    "data_parallel_size": "--vllm-data-parallel-size",
    "pipeline_parallel_size": "--vllm-pipeline-parallel-size",
    "expert_parallel": "--vllm-enable-expert-parallel",
}

_CONTEXT_PARALLEL = ("prefill_context_parallel_size", "decode_context_parallel_size")


def engine_facts(backend_args: Mapping[str, Any]) -> EngineFacts:
    """Returns the facts that slime needs about engines with these flags of vLLM (`EngineConfig.backend_args`)."""
    return EngineFacts(
        project="vLLM",
        router="vllm-router",
        memory_share=backend_args.get("gpu_memory_utilization", ENGINE_SHARE),
        cache_bytes=backend_args.get("kv_cache_memory_bytes"),
        dtype=backend_args.get("dtype"),
        weight_bytes=fp8.WEIGHT_BYTES if fp8.quantizes(backend_args) else None,
        invariant=not fp8.quantizes(backend_args)
        and not backend_args.get("speculative_config")
        and all((backend_args.get(name) or 1) == 1 for name in _CONTEXT_PARALLEL),
        drafts=(backend_args.get("speculative_config") or {}).get("method") == "mtp",
        context=_context(backend_args.get("max_model_len")),
        media_limits=_media_limits(backend_args.get("limit_mm_per_prompt")),
        data_parallel_size=backend_args.get("data_parallel_size") or 1,
        pipeline_parallel_size=backend_args.get("pipeline_parallel_size") or 1,
        expert_parallel=bool(backend_args.get("enable_expert_parallel")),
        flag_of=FLAG_NAMES,
    )


def _context(limit: object) -> int | None:
    """Returns --vllm-max-model-len as a number of tokens, or None.

    With auto or -1, vLLM chooses the length that its memory can hold.
    """
    return limit if isinstance(limit, int) and limit > 0 else None


def _media_limits(limits: Mapping[str, Any] | None) -> dict[str, int]:
    """Returns the numbers of --vllm-limit-mm-per-prompt. A limit is a number, or a record with `count`."""
    counts = {
        kind: one.get("count") if isinstance(one, Mapping) else one for kind, one in (limits or {}).items()
    }
    return {kind: count for kind, count in counts.items() if isinstance(count, int)}


def check_concurrency(config: Config) -> None:
    """Checks that --vllm-server-concurrency is above 0."""
    if config.engine.server_concurrency <= 0:
        raise FlagError("--vllm-server-concurrency", "be above 0", config.engine.server_concurrency)


class VllmBackend:
    """Implements `slime.rollout_backend.RolloutBackend` with vLLM."""

    name = "vllm"
    specs = {spec.name: spec for spec in (CONCURRENCY, INVARIANT, ROUTER_IP, ROUTER_PORT)}
    owners = (flags.VLLM, flags.ROUTER)
    unsupported = SLIME_ROUTER_FLAGS
    no_effect = NO_EFFECT
    peer_names = VLLM_PEER_NAMES
    foreign = PREFIX
    engine_rules = (
        flags.check_engine_size,
        flags.check_engine_nodes,
        check_engine_heads,
        flags.check_context_length,
        flags.check_architecture,
        check_quantized_checkpoint,
    )
    rules = (
        check_concurrency,
        *engine_rules,
        flags.check_weight_channel,
        fp8.check_quantization,
        check_prefill_engines,
        external.check_addresses,
        external.check_weights,
    )

    def translate(self, groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
        """Translates SGLang's flags into vLLM's flags."""
        return translate_sglang(groups)

    def fields(self, own: dict[str, object], typed: dict[str, Any]) -> dict[str, object]:
        """Returns the fields of the engine section. Hooks find vLLM's arguments in their `args` as vllm_NAME."""
        args = typed.get("backend_args", {})
        concurrency = own.get(CONCURRENCY.name, CONCURRENCY.default)
        if adapts := concurrency == "auto":
            concurrency = CONCURRENCY.default  # a number, because hooks compute with it
        hooks = {name: entry.default for name, entry in SLIME_ROUTER_FLAGS.items()}
        hooks |= {name: spec.default for name, spec in NO_EFFECT.items() if spec.default is not None}
        hooks |= {
            CONCURRENCY.name: concurrency,
            INVARIANT.name: own.get(INVARIANT.name, INVARIANT.default),
            ROUTER_IP.name: own.get(ROUTER_IP.name),
            ROUTER_PORT.name: own.get(ROUTER_PORT.name),
            "vllm_args": args,
            "vllm_argv": typed.get("backend_argv", []),
        }
        hooks |= {f"vllm_{name}": value for name, value in args.items()}
        return {
            **typed,
            "server_concurrency": concurrency,
            "adapts_concurrency": adapts,
            "router_ip": own.get(ROUTER_IP.name),
            "router_port": own.get(ROUTER_PORT.name),
            "backend_env": {"VLLM_BATCH_INVARIANT": "1"} if own.get(INVARIANT.name) else {},
            "engine_facts": engine_facts(args),
            "hook_args": hooks,
        }

    def remarks(self, config: Config) -> Iterator[str]:
        """Yields notes on the engines. Raises ValueError for a vLLM that is too old."""
        return flags.remarks(config)

    def rows(self) -> Iterator[Row]:
        """Yields every flag of vLLM and vllm-router (imports both), and the flags of SGLang that are translated."""
        for owner in (flags.VLLM, flags.ROUTER):
            yield from owner.rows()
        for name, target in targets().items():
            yield {
                "flag": "--sglang-" + name.replace("_", "-"),
                "owner": "translated",
                "default": None,
                "help": f"becomes {target}",
                "choices": None,
                "translated_to": target,
            }

    def command_lines(self, config: Config) -> Iterator[str]:
        """Yields the server's own command-line option for each engine and router flag."""
        for tokens in pair_up(config.engine.backend_argv):
            yield f"{'--vllm-' + tokens[0][2:]:<40} vLLM {' '.join(tokens)}"
        empty = flags.starts_empty(config)
        spec = VllmSpec(**flags.engine_settings(config), starts_empty=empty, run_key="", log_path="")
        server = VllmServer(spec).command()[4:]  # after "python -m vime.vllm.serve MODULE"
        for tokens in pair_up(server[: len(server) - len(spec.vllm_argv)]):
            if option(tokens) not in ("host", "port"):  # the address is known when the server starts
                shown = tokens if len(tokens) < 10 else [*tokens[:4], "...", tokens[-1]]
                yield f"{'(set for you)':<40} vLLM {' '.join(shown)}"
        if share := flags.memory_share(config):
            yield f"{'(set for you)':<40} vLLM {' '.join(share)} instead, for each engine of a GPU"
        for tokens in pair_up(config.engine.router_argv):
            yield f"{'--router-' + tokens[0][2:]:<40} vllm-router {' '.join(tokens)}"

    def require_reachable(self, config: Config) -> None:
        """Checks that external engines and an external router answer, and that only this run uses the router. Checks
        that own engines find our plug-in, and that engines on CPUs, or on this machine's GPUs, can compute the
        model."""
        # This check is not in `rules`, because a plan for GPUs can be made on a machine with CPUs only.
        fp8.check_on_cpu(config)
        check_cpu(config)
        flags.require_deep_gemm(config)
        require_connector(config)
        if config.num_engines and not config.rollout.rollout_external_engine_addrs:
            versions.require_plugin()
        external.require_reachable(config)

    def pool(
        self, config: Config, placed: Placement, source: WeightSource | None, model: ServedModel
    ) -> EnginePool:
        """Returns the engines of a model and their router. They are not started yet."""
        from vime.pool.launch import make_pool
        from vime.vllm.pool import VllmEnginePool, kind_for

        own: dict[str, object] = {
            "top_tokens": model.top_tokens,
            "temperature": model.temperature,
            "scores": model.frozen,
            "starts_empty": source is not None and not model.frozen and flags.starts_empty(config),
        }
        if model.frozen:  # no adapter belongs to a frozen model
            own |= {
                "lora_rank": 0,
                "keeps_weights": False,
                "keeps_cache": False,
                "bitwise": (),
                "fp8_scales": None,
            }
        return make_pool(
            VllmEnginePool,
            config,
            placed,
            source,
            model,
            functools.partial(VllmSpec, **flags.engine_settings(config) | own),
            dtype=engine_dtype(config),
            frees_memory=flags.frees_memory(config),
            kind=kind_for("" if model.frozen else adapter_name(config)),
        )
