"""`python -m vime.sglang.router_main ARGS` runs sglang-router, whose routes need the run's key from $VIME_RUN_KEY.

sglang-router's own command takes the key on the command line, which every user of the machine can read. /health,
/v1/models and the Prometheus counters need no key, because they contain no secret. The counters are on loopback, at a
free port.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs

from vime.pool.asgi import KEY_VARIABLE
from vime.pool.process import hold_port


def main(argv: Sequence[str]) -> None:
    """Serves until the process is terminated. `argv` has the arguments of sglang-router's own command line."""
    run_key = os.environ[KEY_VARIABLE]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    args = RouterArgs.from_cli_args(parser.parse_args(argv), use_router_prefix=False)
    prometheus = hold_port("127.0.0.1")
    args.prometheus_host, args.prometheus_port = prometheus.getsockname()
    args.api_key = run_key
    args._validate_router_args()
    Router.from_args(args).start()


if __name__ == "__main__":
    main(sys.argv[1:])
