"""The state of a process that generates without a run, through the router of `vime serve`.

Programs of plug-ins use it to try their agents before a run (`slime.agent.adapters`).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.config import Config
from slime.rollout.state import GenerateState
from vime.pool.external import read_run_key
from vime.vllm.client import VllmEngineClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARSER = "vime.vllm.chat_parser.make_parser"


def make_state(router_url: str, flags: Namespace, tokenizer: PreTrainedTokenizerBase) -> GenerateState:
    """Returns a state with the flags of a program. A missing flag has its default. Raises ValueError without
    VIME_RUN_KEY."""
    config = Config.from_args(flags)
    engine_flags = {name: value for name, value in vars(flags).items() if name.startswith("vllm_")}
    config = replace(
        config, engine=replace(config.engine, hook_args={**config.engine.hook_args, **engine_flags})
    )
    client = VllmEngineClient(router_url, read_run_key())
    return GenerateState(config, client, tokenizer, hook_args=flags, chat_parser_path=PARSER)
