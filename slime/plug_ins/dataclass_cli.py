"""Makes a command line from a dataclass, for Python launch scripts. The caller installs the package typer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, TypeVar, get_type_hints

T = TypeVar("T")
PREFIXES = ("SLIME_SCRIPT_", "VIME_SCRIPT_")


def dataclass_cli(func: Callable[..., T], env_var_prefix: str | None = None) -> Callable[..., T]:
    """Returns a function for typer with one option per field of the dataclass that `func` takes as its only argument.

    `--num-nodes 2` or the environment variable SLIME_SCRIPT_NUM_NODES (VIME_SCRIPT_NUM_NODES for upstream vime) sets
    the field `num_nodes`. Raises ValueError if the argument is no dataclass, or if typer is not installed.
    """
    try:
        option = import_module("typer").Option
    except ModuleNotFoundError as error:
        raise ValueError(
            "dataclass_cli must have the Python package typer, got none; run `pip install typer`"
        ) from error
    (name,) = inspect.signature(func).parameters
    kind = get_type_hints(func).get(name)
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise ValueError(
            f"the argument of {func.__name__} must have a dataclass as its type, got {kind!r}; annotate it"
        )
    hints = get_type_hints(kind)
    own = inspect.signature(kind).parameters.values()

    @functools.wraps(func)
    def command(**values: object) -> T:
        return func(kind(**values))

    prefixes = PREFIXES if env_var_prefix is None else (env_var_prefix,)
    parameters = []
    for one in own:
        variables = [prefix + one.name.upper() for prefix in prefixes]
        parameters.append(one.replace(annotation=Annotated[hints[one.name], option(envvar=variables)]))
    vars(command).pop("__wrapped__")  # typer would read the signature of `func`
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command
