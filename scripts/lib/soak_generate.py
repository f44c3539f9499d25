"""The generate function of a soak test. Responses have a heavy tail of lengths, and requests go through the proxy.

Use: --custom-generate-function-path soak_generate.generate, with `examples/bench` and this folder on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lengths

from slime.rollout.generate import GenerateState

PROXY_FILE = "proxy.url"
"""File next to the run directory with the proxy's address, which the soak test writes."""
ROUTER_FILE = "router.url"
"""File next to the run directory with the router's address for the proxy. A run that starts again has another
router."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    engine = GenerateState(args).engine
    folder = Path(args.run_dir).parent
    proxy = (folder / PROXY_FILE).read_text(encoding="utf-8")
    if engine.router_url != proxy:
        (folder / ROUTER_FILE).write_text(engine.router_url, encoding="utf-8")
        engine.router_url = proxy
    return await lengths.generate(args, sample, sampling_params)
