"""`python -m vime.vllm.router_main ARGS`: runs vllm-router with the run's key, from $VIME_RUN_KEY, on every route.

vllm-router's --api-key must not be used: the router sends that key to the workers even for callers without a key. The
router can guard its own routes with a list of URLs, `api_key_validation_urls`, that it queries once per new key. This
list is not an option of its command line. This file starts the router with one such URL, which a child process on
loopback serves. The router does not start without a key. A second child process serves the requests of plug-ins (see
vime.sglang_api.gateway).

The router's Prometheus counters cannot be turned off. They are read-only, on loopback at a free port. They contain the
workers' URLs, and so the health path, but never the key.
"""

from __future__ import annotations

import argparse
import hmac
import os
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import vllm_router_rs
from vllm_router.router import policy_from_str
from vllm_router.router_args import RouterArgs

from vime.pool.asgi import KEY_VARIABLE
from vime.pool.process import hold_port
from vime.pool.supervise import die_with_parent
from vime.sglang_api import gateway


class _KeyServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


def start_key_server(run_key: str) -> str:
    """Forks a process that answers GET with 200 for the right key and 401 otherwise. Returns its URL.

    It is a separate process, because the router holds Python's interpreter lock while it serves. It ends with the
    caller's process.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0  # seconds: a silent client releases its thread

        def do_GET(self) -> None:
            authorization = self.headers.get("Authorization", "").encode("latin-1")
            self.send_response(
                200 if hmac.compare_digest(authorization, b"Bearer " + run_key.encode()) else 401
            )
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Does not log requests, because they contain keys."""

    server = _KeyServer(("127.0.0.1", 0), Handler)
    if os.fork() == 0:
        die_with_parent()
        server.serve_forever()
    server.socket.close()
    return f"http://127.0.0.1:{server.server_port}"


def start_gateway(host: str, port: int, router_url: str, adapter: str, checkpoint: str = "") -> None:
    """Forks the process of vime.sglang_api.gateway, which ends with the caller's process."""
    listening = gateway.listen(host, port)
    if os.fork() == 0:
        die_with_parent()
        gateway.serve(router_url, listening, adapter, checkpoint)
        os._exit(0)
    listening.close()


def main(argv: Sequence[str]) -> None:
    """Serves until terminated. `argv` holds the options of vllm-router's own command line."""
    run_key = os.environ[KEY_VARIABLE]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--gateway-host", required=True)
    parser.add_argument("--gateway-port", type=int, required=True)
    parser.add_argument("--adapter", default="")
    parser.add_argument("--checkpoint", default="")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    options = parser.parse_args(argv)
    args = RouterArgs.from_cli_args(options, use_router_prefix=False)
    args._validate_router_args()
    prometheus = hold_port("127.0.0.1")
    settings = {
        **vars(args),
        "policy": policy_from_str(args.policy),
        "prefill_policy": policy_from_str(args.prefill_policy),
        "decode_policy": policy_from_str(args.decode_policy),
        "prefill_urls": None,
        "decode_urls": None,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": prometheus.getsockname()[1],
        "api_key": None,
        "api_key_validation_urls": [start_key_server(run_key)],
    }
    del settings["mini_lb"]
    router_url = f"http://{args.host}:{args.port}"
    start_gateway(options.gateway_host, options.gateway_port, router_url, options.adapter, options.checkpoint)
    vllm_router_rs.Router(**settings).start()


if __name__ == "__main__":
    main(sys.argv[1:])
