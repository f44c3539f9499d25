"""`vime service --base DIR`: serves the Tinker protocol to tenants, each of whom trains and samples own adapters.

The service prints its address, and a new tenant's key once. It ends at Ctrl-C after the running training
request. A service that starts again with the same --data continues where the last one ended, also after kill -9.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from aiohttp import web

from vime.run.lock import lock
from vime.service.app import make_app
from vime.service.limits import TenantLimits
from vime.service.service import ServiceSettings, TenantService

LOOPBACK = "127.0.0.1"
_LIMIT_HELP = {
    "models_per_tenant": "models that one key may train at the same time",
    "tokens_per_minute": "tokens of training and sampling per key and minute",
    "queue_length": "requests of one key that wait or run",
    "open_requests": "HTTP requests of one key at the same time",
    "checkpoint_bytes": "bytes of one key's checkpoints",
    "rank": "largest rank of an adapter",
    "tokens_per_sequence": "tokens of one sequence",
    "samples_per_request": "responses of one sample request",
    "body_bytes": "bytes of one request",
}


def main(argv: Sequence[str]) -> int:
    """Serves until a signal ends the process. Raises ValueError for an error that the user can correct."""
    args = _parser().parse_args(argv)
    if not (args.base / "config.json").is_file():
        raise ValueError(
            f"--base must be a folder with config.json, got {args.base}; give a Hugging Face checkpoint"
        )
    limits = TenantLimits(**{name: getattr(args, name) for name in _LIMIT_HELP})
    for name in _LIMIT_HELP:
        if (value := getattr(limits, name)) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, got {value}; give a larger number"
            )
    config = json.loads((args.base / "config.json").read_text(encoding="utf-8"))
    context = config.get("max_position_embeddings", limits.tokens_per_sequence)
    if limits.tokens_per_sequence > context:
        raise ValueError(
            f"--tokens-per-sequence must be at most {context}, the base's max_position_embeddings, got "
            f"{limits.tokens_per_sequence}; give --tokens-per-sequence {context}"
        )
    settings = ServiceSettings(
        args.base,
        args.name or str(args.base),
        args.data or args.base.with_name(f"{args.base.name}-service"),
        config["vocab_size"],
        args.snapshot_seconds,
        args.idle_seconds,
        adapters=args.adapters,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    with ExitStack() as stack:
        lock("--data", settings.data, stack)
        asyncio.run(
            _serve(settings, limits, args.host, args.port, args.tenants.split(","), args.engine_memory)
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vime service", allow_abbrev=False)
    parser.add_argument(
        "--base", type=Path, required=True, help="a Hugging Face checkpoint: the base of all adapters"
    )
    parser.add_argument("--name", help="the base's name for clients (default: --base)")
    parser.add_argument(
        "--data", type=Path, help="folder of keys, requests and checkpoints (default: BASE-service)"
    )
    parser.add_argument(
        "--tenants", default="default", help="names, separated by commas; each gets a key (default: default)"
    )
    parser.add_argument(
        "--engine-memory", type=float, default=0.4, help="the sampler's share of a GPU's memory (default 0.4)"
    )
    parser.add_argument("--host", default=LOOPBACK, help=f"address to listen on (default {LOOPBACK})")
    parser.add_argument(
        "--port", type=int, default=8900, help="port to listen on; 0 takes a free one (default 8900)"
    )
    parser.add_argument(
        "--adapters", type=int, default=8, help="adapters in the sampler at the same time (default 8)"
    )
    parser.add_argument(
        "--snapshot-seconds",
        type=float,
        default=30.0,
        help="least seconds between snapshots of a model (default 30)",
    )
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=300.0,
        help="seconds without a heartbeat after which a client counts as away (default 300)",
    )
    for each in fields(TenantLimits):
        if each.name in _LIMIT_HELP:
            text = f"{_LIMIT_HELP[each.name]} (default {each.default})"
            parser.add_argument(f"--{each.name.replace('_', '-')}", type=int, default=each.default, help=text)
    return parser


async def _serve(
    settings: ServiceSettings,
    limits: TenantLimits,
    host: str,
    port: int,
    tenants: Sequence[str],
    memory: float,
) -> None:
    from slime.megatron_backend.tenants import build_trainer
    from vime.service.engine import TenantEngine

    engine = TenantEngine(
        settings.base,
        settings.adapters,
        limits.rank,
        limits.tokens_per_sequence,
        settings.data / "engine",
        memory=memory,
    )
    service = TenantService(
        settings,
        limits,
        lambda: build_trainer(settings.base, limits.rank, limits.tokens_per_sequence, engine_share=memory),
        engine,
    )
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with contextlib.AsyncExitStack() as stack:
        await engine.start()
        stack.push_async_callback(engine.stop)
        await service.start()
        stack.push_async_callback(service.stop)
        runner = web.AppRunner(make_app(service), access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ValueError(
                f"--port must be free, got {port}: {error.strerror}; choose another port"
            ) from error
        new = service.keys.add_missing([name.strip() for name in tenants])
        for tenant, key in new.items():
            print(f"key of {tenant}, shown only now: {key}")
        bound = runner.addresses[0]
        print(
            f"serving {settings.name} at http://{bound[0]}:{bound[1]} for {', '.join(service.keys.tenants)}",
            flush=True,
        )
        await ended.wait()
