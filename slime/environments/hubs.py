"""The table of the hubs, and the text that names an environment: `HUB:NAME?argument=value&...`.

Three arguments belong to the run. `python` is the Python that has the hub's package, `split` is the name of the tasks
to use, and `tasks` is their maximum number. The environment gets all other arguments. A value is read as JSON if
possible, and as a text otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from slime.records.errors import FlagError
from slime.types import Json

EXAMPLE = "write HUB:NAME?argument=value, such as verifiers:my-env?tasks=100"


@dataclass(frozen=True)
class Hub:
    """A project that has environments."""

    file: str
    """File of the connector in `slime/environments/connectors`, without its suffix."""
    named: str
    """Description of the text after the colon, for error messages."""
    package: str | None = None
    """The package that pip installs. None if the connector needs no package."""
    module: str = ""
    """The module by which the connector's process finds the package."""
    python: tuple[int, int] = (3, 11)
    """The oldest Python that runs the package."""


HUBS: Mapping[str, Hub] = {
    "verifiers": Hub("verifiers_hub", "the environment's module", "verifiers", "verifiers"),
    "harbor": Hub("harbor_hub", "a folder of tasks", "harbor", "harbor", (3, 12)),
    "openenv": Hub("openenv_hub", "the server's URL, or an environment of the hub", "openenv", "openenv"),
    "nemo-gym": Hub("nemo_gym_hub", "the resource server's URL", "aiohttp", "aiohttp"),
}


@dataclass(frozen=True)
class Environment:
    """One value of --environment."""

    text: str
    hub: Hub
    name: str
    arguments: dict[str, Json] = field(default_factory=dict, hash=False)
    python: str = sys.executable
    split: str | None = None
    tasks: int | None = None


def is_environment(text: str) -> bool:
    """Returns True if `text` begins with the name of a hub and a colon."""
    return text.partition(":")[0] in HUBS and ":" in text


def find_environment(text: str, flag: str = "--environment") -> Environment:
    """Returns the environment that `text` names. Raises ValueError with `flag` for an unknown hub or a wrong
    argument."""
    address, _, query = text.partition("?")
    hub, _, name = address.partition(":")
    if hub not in HUBS:
        raise FlagError(flag, f"begin with a hub ({', '.join(HUBS)}) and a colon", repr(text), EXAMPLE)
    if not name:
        raise FlagError(flag, f"have {HUBS[hub].named} after the colon", repr(text), EXAMPLE)
    arguments: dict[str, Json] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise FlagError(flag, "have arguments NAME=VALUE after ?", repr(text), EXAMPLE) from error
    for key, value in pairs:
        if key in arguments:
            raise FlagError(flag, "have each argument once", f"{key} twice in {text!r}", "leave one out")
        arguments[key] = _value(value)
    python, split, tasks = (arguments.pop(key, None) for key in ("python", "split", "tasks"))
    if tasks is not None and not (type(tasks) is int and tasks > 0):
        raise FlagError(
            flag, "have a whole number above 0 as tasks", f"{tasks!r} in {text!r}", "correct the number"
        )
    return Environment(
        text,
        HUBS[hub],
        name,
        arguments,
        sys.executable if python is None else str(python),
        None if split is None else str(split),
        tasks,
    )


def _value(text: str) -> Json:
    try:
        value: Json = json.loads(text)
    except ValueError:
        return text
    return value
