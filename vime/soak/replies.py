"""The generate function of a soak with faults of replies. It sends the run's requests through the soak's proxy.

The soak sets it as --custom-generate-function-path, and it calls the user's function, or slime's without one.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from pathlib import Path

from slime.hooks import load_function
from slime.rollout.generate import generate as generate_one
from slime.rollout.sample_hooks import accepted
from slime.rollout.state import current_state
from slime.types import Sample, SamplingParams
from vime.pool.router_client import RouterClient

GENERATE = "vime.soak.replies.generate"
PROXY_FILE = "proxy.url"
"""File in the soak's folder with the proxy's address."""
ROUTER_FILE = "router.url"
"""File in the soak's folder with the router's address for the proxy. A run that starts again has another router."""
FUNCTION_FILE = "generate.path"
"""File in the soak's folder with the user's --custom-generate-function-path, or empty."""


def soak_folder(run_dir: str | Path) -> Path:
    """Returns the folder of a soak's own files, next to the run directory."""
    path = Path(run_dir).absolute()
    return path.with_name(f"{path.name}-soak")


async def generate(
    flags: Namespace, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample | list[Sample]:
    """Calls the user's generate function, whose requests go to the proxy instead of the router."""
    folder, engine = soak_folder(flags.run_dir), current_state().engine
    proxy = (folder / PROXY_FILE).read_text(encoding="utf-8")
    assert isinstance(engine, RouterClient), "the flags were checked: the run has engines behind a router"
    if engine.router_url != proxy:
        (folder / ROUTER_FILE).write_text(engine.router_url, encoding="utf-8")
        engine.router_url = proxy
    path = (folder / FUNCTION_FILE).read_text(encoding="utf-8")
    function = load_function(path, "--custom-generate-function-path") if path else generate_one
    result = function(flags, sample, sampling_params, **accepted(function, evaluation=evaluation))
    made: Sample | list[Sample] = await result if inspect.isawaitable(result) else result
    return made
