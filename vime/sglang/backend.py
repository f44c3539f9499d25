"""The rollout backend of SGLang behind sglang-router: its flags, its rules, the facts about its engines, and their
start.

The import is light: the functions that need SGLang, Ray or torch import them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime.config import Config, FlagGroup
from slime.config.peer_names import NONE
from slime.config.sections.engine import EngineFacts
from slime.protocols import WeightSource
from slime.records.errors import FlagError
from slime.roles.served import ServedModel
from slime.rules.listing import Row
from vime.pool import external
from vime.pool.engine_flags import check_engine_heads, common_settings, engine_dtype
from vime.pool.engine_server import pair_up
from vime.sglang import server_flags as flags
from vime.sglang.server import SglangServer, SglangSpec

if TYPE_CHECKING:
    from slime.cluster.placement import Placement
    from slime.protocols import EnginePool


class SglangBackend:
    """Implements `slime.rollout_backend.RolloutBackend` with SGLang."""

    name = "sglang"
    specs = {spec.name: spec for spec in (flags.CONCURRENCY, flags.ROUTER_PORT)}
    owners = (flags.SGLANG, flags.ROUTER)
    unsupported = flags.UNSUPPORTED
    no_effect = flags.NO_EFFECT
    peer_names = NONE
    foreign = "vllm_"
    engine_rules = (flags.check_engines, check_engine_heads)
    rules = (
        flags.check_concurrency,
        flags.check_weights,
        flags.check_prefill,
        *engine_rules,
        external.check_addresses,
        external.check_weights,
    )

    def translate(self, groups: list[FlagGroup]) -> tuple[list[FlagGroup], list[str]]:
        """Replaces --sglang-config by the flags in its file, and gives slime's router flags the router's own names."""
        return flags.translate(groups)

    def fields(self, own: dict[str, object], user_values: dict[str, Any]) -> dict[str, object]:
        """Returns the fields of the engine section. Hooks find SGLang's arguments in their `args` as sglang_NAME."""
        args = user_values.get("backend_args", {})
        concurrency = own.get(flags.CONCURRENCY.name, flags.CONCURRENCY.default)
        port = own.get(flags.ROUTER_PORT.name)
        hooks = {name: entry.default for name, entry in flags.UNSUPPORTED.items()}
        hooks |= {name: spec.default for name, spec in flags.NO_EFFECT.items() if spec.default is not None}
        hooks |= {flags.CONCURRENCY.name: concurrency, flags.ROUTER_PORT.name: port}
        hooks |= {f"sglang_{name}": value for name, value in args.items()}
        return {
            **user_values,
            "server_concurrency": concurrency,
            "router_port": port,
            "engine_facts": _facts(args),
            "hook_args": hooks,
        }

    def remarks(self, config: Config) -> Iterator[str]:
        """Yields notes on the engines: SGLang itself was never run, and samples may ignore their seeds."""
        yield (
            "--rollout-backend sglang: this version was run through sglang-router 0.3.2 against vLLM engines that "
            "answer SGLang's protocol, and never against a SGLang server"
        )
        if "enable_deterministic_inference" not in config.engine.backend_args:
            yield "SGLang ignores the seeds of samples without --sglang-enable-deterministic-inference"

    def rows(self) -> Iterator[Row]:
        """Yields each flag of sglang-router, and imports sglang-router. SGLang's flags are left out, because SGLang
        checks them itself."""
        yield from flags.ROUTER.rows()

    def command_lines(self, config: Config) -> Iterator[str]:
        """Yields the server's own command-line option for each engine and router flag."""
        for tokens in pair_up(config.engine.backend_argv):
            yield f"{'--sglang-' + tokens[0][2:]:<40} SGLang {' '.join(tokens)}"
        server = SglangServer(_spec(config, run_key="", log_path="")).command()[
            3:
        ]  # after "python -m MODULE"
        for tokens in pair_up(server[: len(server) - len(config.engine.backend_argv)]):
            if tokens[0] not in ("--host", "--port"):  # the address is known when the server starts
                yield f"{'(set for you)':<40} SGLang {' '.join(tokens)}"
        for tokens in pair_up(config.engine.router_argv):
            yield f"{'--router-' + tokens[0][2:]:<40} sglang-router {' '.join(tokens)}"

    def require_reachable(self, config: Config) -> None:
        """Raises ValueError if SGLang or sglang-router is not installed, or if an external engine does not answer. A
        run with external engines does not need SGLang."""
        flags.require_installed(config)
        external.require_reachable(config, "/model_info")

    def pool(
        self, config: Config, placed: Placement, source: WeightSource | None, model: ServedModel
    ) -> EnginePool:
        """Returns the engines of a model and their router. They are not started yet."""
        from vime.pool.launch import make_pool
        from vime.sglang.pool import SglangEnginePool

        make_spec = functools.partial(_spec, config)
        dtype = engine_dtype(config)
        return make_pool(SglangEnginePool, config, placed, source, model, make_spec, dtype=dtype)


def _facts(backend_args: Mapping[str, Any]) -> EngineFacts:
    return EngineFacts(
        project="SGLang",
        router="sglang-router",
        memory_share=_share(backend_args.get("mem_fraction_static", EngineFacts.memory_share)),
        dtype=backend_args.get("dtype"),
        context=_context(backend_args.get("context_length")),
        flag_of={"memory_share": "--sglang-mem-fraction-static", "context": "--sglang-context-length"},
    )


def _context(typed: str | int | None) -> int | None:
    """Returns --sglang-context-length as a number, or None without the flag. Raises ValueError for any other text."""
    if typed is None:
        return None
    try:
        return int(typed)
    except ValueError:
        raise FlagError(
            "--sglang-context-length", "be a number of tokens", typed, "give the longest sequence"
        ) from None


def _share(typed: str | float) -> float:
    try:
        return float(typed)
    except (TypeError, ValueError):
        raise FlagError(
            "--sglang-mem-fraction-static", "be a number", typed, "give a part of the GPU's memory"
        ) from None


def _spec(config: Config, **more: Any) -> SglangSpec:
    return SglangSpec(**common_settings(config), sglang_argv=tuple(config.engine.backend_argv), **more)
