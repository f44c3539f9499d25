"""`vime serve engine|router HOST:PORT FLAGS`: serves one engine or router that runs use by its address, until Ctrl-C.

FLAGS are those of `vime train`. The key comes from VIME_RUN_KEY. The log is in `serve/` of the run directory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from slime.config import Config
from vime.backends import parse_config
from vime.pool import external
from vime.pool.process import sigterm_interrupts
from vime.pool.router import RouterSpec
from vime.vllm import server_flags as flags
from vime.vllm.router import VllmRouter
from vime.vllm.server import VllmServer, VllmSpec

KINDS = ("engine", "router")
_KEEP_PORT_S = 5.0
"""Seconds for which the port of a server that has ended stays reserved.

Its runs then notice the end before another program can get the port, so no request with their key reaches a stranger.
"""
USAGE = "usage: vime serve engine|router HOST:PORT FLAGS, with the flags of vime train"


def main(argv: Sequence[str]) -> int:
    """Serves until interrupted. Returns exit code 0 then, and 1 if the server ended unasked."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if len(argv) < 2 or argv[0] not in KINDS:
        raise ValueError(
            f"serve must be given engine or router and HOST:PORT, got {' '.join(argv[:2]) or 'none'}; {USAGE}"
        )
    kind, address = argv[0], external.split(argv[1], f"the address of vime serve {argv[0]}")
    key, config = external.read_run_key(), parse_config(argv[2:], download=True)
    if config.engine.rollout_backend != "vllm":
        raise ValueError(
            f"vime serve must be given engines of --rollout-backend vllm, got {config.engine.rollout_backend}; start "
            "other servers by their own commands, with the key of the run as their API key"
        )
    server = make(kind, config, key, address["host"], address["port"])
    with sigterm_interrupts():
        try:
            server.start()
            server.wait_ready()
            print(
                f"{kind} serves at {address['host']}:{address['port']}; log: {server.spec.log_path}",
                flush=True,
            )
            while server.poll() is None:
                time.sleep(0.5)
            print(f"the {kind} ended; its last log lines:\n{server.tail_log()}", flush=True)
            time.sleep(_KEEP_PORT_S)
            return 1
        except KeyboardInterrupt:
            return 0
        finally:
            server.stop()


def make(kind: str, config: Config, key: str, host: str, port: int) -> VllmServer | VllmRouter:
    """Returns the server, not started yet. A router's callers reach it through its gateway, which can prove that it has
    the key."""
    log = str(Path(config.logging.run_dir).resolve() / "serve" / f"{kind}-{host}-{port}.log")
    if kind == "router":
        timeout_s = config.rollout.rollout_deadline_s
        return VllmRouter(
            RouterSpec(
                run_key=key,
                log_path=log,
                gateway_host=host,
                gateway_port=port,
                argv=tuple(config.engine.router_argv),
                request_timeout_s=timeout_s,
            )
        )
    external.check_weights(config)
    if config.weight_update.weight_dir is None:
        raise ValueError(
            "--weight-dir must be given with vime serve engine, got none; name the folder that the run publishes its "
            "weights in, weight_update.weight_dir in its config.json"
        )
    return VllmServer(
        VllmSpec(**flags.engine_settings(config), run_key=key, log_path=log, host=host, port=port)
    )
