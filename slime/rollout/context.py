"""This module defines the record that generation, rewards, sessions, distillation and data read: flags and run state.

    args of a plug-in's call --find_context--> RunContext --> the functions of this project
                                             RunContext.hook_args --> functions of the user

A plug-in calls functions under slime's names with `args`. Each such function converts `args` into a context at once,
and passes the context to this project's functions. No other function reads `args`.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from argparse import Namespace
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import TypeVar

from slime.config.schema import Config
from slime.rollout.state import GenerateState, NoRunError, entered

T = TypeVar("T")


@dataclass(frozen=True)
class RunContext:
    """The flags of a run as sections, and the state of its generation.

    Example::

        context = RunContext.from_state(state)
        seed = request_seed(context.config.rollout.rollout_seed, stream, 0)
        result = await context.run.engine.generate(token_ids, params, seed=seed, deadline_s=60.0)
        reward = await user_function(context.hook_args, sample)
    """

    config: Config
    """All sections, with the values that hooks have set in `hook_args`."""
    hook_args: Namespace
    """The flat flags that a user's function gets as `args`."""
    state: GenerateState | None = None
    """The engines, tokenizer, events, limits and counters of the run. None in a process without a run, where rewards
    can be computed nevertheless."""

    @classmethod
    def from_state(cls, state: GenerateState) -> RunContext:
        """Returns the context of the run whose state this is, as hooks have left its `args`."""
        return cls(Config.from_args(state.args), state.args, state)

    @property
    def run(self) -> GenerateState:
        """Returns the state of the run. Raises RuntimeError in a process without a run."""
        if self.state is None:
            raise NoRunError
        return self.state

    def for_evaluation(self) -> RunContext:
        """Returns the context of an evaluation: without the records of tokens that only training reads.

        Functions of the user see `args.use_rollout_routing_replay` and `args.use_score_centering` as False.
        """
        off_policy, algorithm = self.config.off_policy, self.config.algorithm
        if not (off_policy.use_rollout_routing_replay or algorithm.use_score_centering):
            return self
        hook_args = copy.copy(self.hook_args)
        hook_args.use_rollout_routing_replay = hook_args.use_score_centering = False
        config = replace(
            self.config,
            off_policy=replace(off_policy, use_rollout_routing_replay=False),
            algorithm=replace(algorithm, use_score_centering=False),
        )
        return replace(self, config=config, hook_args=hook_args)


_own_loop: asyncio.AbstractEventLoop | None = None


def find_context(args: Namespace) -> RunContext:
    """Returns the context of a plug-in's call: the flags in its `args`, and the state of this process's run.

    A flag that is missing in `args` has its default. The state is None in a process without a run.
    """
    return RunContext(Config.from_args(args), args, entered())


def run_in_process(coroutine: Coroutine[object, object, T]) -> T:
    """Runs the coroutine to its end in the loop of this process's rollout, or in a new loop if no rollout runs.

    Raises RuntimeError if a coroutine in the rollout's loop calls this, because it would wait for itself.
    """
    global _own_loop
    state = entered()
    loop = _own_loop if state is None else state.loop
    if loop is not None and asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError(
            "run(coroutine) must not be called in a coroutine, got a call in one; await it there"
        )
    if state is not None:
        return state.run(coroutine)
    if _own_loop is None:
        _own_loop = asyncio.new_event_loop()
        threading.Thread(target=_own_loop.run_forever, name="plug-in", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _own_loop).result()
