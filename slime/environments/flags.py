"""The flags that --environment decides: the prompts, their columns and the generate function. Checks the other flags
against it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping

from slime.config.fields import spelled
from slime.config.problems import Problems
from slime.config.schema import Config
from slime.environments.hubs import find_environment, is_environment
from slime.environments.rows import COLUMNS
from slime.records.errors import FlagError

GENERATE = "slime.sessions.environments.generate"
_NAMED = re.compile(r"([\w.-]+)=(.+)")
_DECIDED: Mapping[str, object] = {**COLUMNS, "apply_chat_template": False}
"""The flags of the prompts, with the values that the file of an environment needs."""
_REWARDS = ("rm_type", "custom_rm_path")


def prompt_data(values: list[str]) -> list[str]:
    """Returns the value of --prompt-data for the values of --environment. Each of several gets a name."""
    if len(values) == 1:
        return list(values)
    return [value if _NAMED.fullmatch(value) else f"{_short(value)}={value}" for value in values]


def _short(value: str) -> str:
    """Returns a name for metrics: "my-env" for verifiers:owner/my-env?tasks=10."""
    name = value.partition("?")[0].partition(":")[2].rstrip("/")
    return re.sub(r"[^\w.-]+", "-", name.rpartition("/")[2] or name).strip("-") or "environment"


def set_flags(draft: argparse.Namespace, stated: Mapping[str, object]) -> Iterator[str]:
    """Sets the flags that --environment decides. Yields a note for each flag whose value has no effect."""
    if not draft.environment:
        return
    if draft.prompt_data is None:
        draft.prompt_data = prompt_data(draft.environment)
    if draft.custom_generate_function_path is None:
        draft.custom_generate_function_path = GENERATE
    for name, value in _DECIDED.items():
        if stated.get(name, value) != value:
            yield (
                f"{spelled(name)} has no effect with --environment: its prompts are in the columns prompt and "
                "metadata, and a session renders them"
            )
        setattr(draft, name, value)


def check_environments(c: Config) -> None:
    """Checks the text of each environment, and that no other flag names prompts, a generate function or a reward."""
    values = c.sessions.environment
    if not values:
        _check_files(c)
        return
    problems = Problems()
    for value in values:
        named = _NAMED.fullmatch(value)
        problems.check(find_environment, named[2] if named else value)
    if c.data.prompt_data != prompt_data(values):
        problems.add(
            FlagError(
                "--prompt-data",
                "be left out with --environment",
                c.data.prompt_data,
                "the environment has the prompts; to mix several environments, give --environment several values",
            )
        )
    if (path := c.rollout.custom_generate_function_path) != GENERATE:
        problems.add(
            FlagError(
                "--custom-generate-function-path",
                "be left out with --environment",
                path,
                "the environment's loop makes the samples",
            )
        )
    for name in _REWARDS:
        if (stated := c.get_value(name)) is not None:
            problems.add(
                FlagError(
                    spelled(name),
                    "be left out with --environment",
                    stated,
                    "the environment's rubric is the reward",
                )
            )
    problems.report()


def check_dataset(c: Config, where: str, path: str, settings: Mapping[str, object]) -> None:
    """Checks a dataset of --eval-config whose path names an environment. `settings` are those of its entry in the
    file."""
    if not is_environment(path):
        return
    flag = f"--eval-config: path of {where}"
    if not c.sessions.environment:
        raise _without_environment(flag, path)
    find_environment(path, flag)
    decided = {"custom_generate_function_path": "loop makes the samples"}
    decided |= dict.fromkeys(_REWARDS, "rubric is the reward")
    decided |= dict.fromkeys(_DECIDED, "file has the prompts")
    for name, what in decided.items():
        if settings.get(name, _DECIDED.get(name)) != _DECIDED.get(name):
            raise FlagError(
                f"--eval-config: {name} of {where}",
                "be left out for an environment",
                settings[name],
                f"the environment's {what}",
            )


def _check_files(c: Config) -> None:
    """Checks that no flag of prompts names an environment in a run without --environment."""
    stated = c.data.prompt_data or []
    named = [("--prompt-data", value) for value in ([stated] if isinstance(stated, str) else stated)]
    named += [("--eval-prompt-data", value) for value in (c.evaluation.eval_prompt_data or [])[1::2]]
    for flag, value in named:
        parts = _NAMED.fullmatch(value)
        if is_environment(parts[2] if parts else value):
            raise _without_environment(flag, value)


def _without_environment(flag: str, value: str) -> FlagError:
    return FlagError(
        flag,
        "name no environment in a run without --environment",
        value,
        "give the environment to train on with --environment",
    )
