"""Recognises rewards that were written for another trainer, and writes an expression of our `sample` that calls them.

Each other trainer is one line of `OTHERS`, and each other name of a parameter is one line of `_VALUES`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType

_MESSAGES = '[{"role": "assistant", "content": sample.response}]'
_PROMPT_MESSAGES = (
    '(sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}])'
)
_IDS = "sample.tokens[len(sample.tokens) - sample.response_length :]"
_RECORD = (
    '{"response": sample.response, "response_length": sample.response_length, "ground_truth": sample.label}'
)
_VALUES = {
    "prompt": "sample.prompt",
    "query": 'f"{sample.prompt}{sample.response}"',
    "response": "sample.response",
    "completion": "sample.response",
    "solution_str": "sample.response",
    "completion_ids": _IDS,
    "label": "sample.label",
    "answer": "sample.label",
    "ground_truth": "sample.label",
    "data_source": 'sample.metadata.get("data_source")',
    "extra_info": 'sample.metadata.get("extra_info", sample.metadata)',
    "reward_input": _RECORD,
}
"""Maps the name of a parameter to its value for one response."""
_LISTS = {
    "completions": "completion",
    "responses": "response",
    "solution_strs": "solution_str",
    "queries": "query",
    "reward_inputs": "reward_input",
}
"""Names of parameters that show a function of several responses, mapped to their singular."""
_PLURALS = {f"{name}s": name for name in _VALUES} | _LISTS | {"completion_ids": "completion_ids"}
_TEXTS = {"prompt", "response", "completion", "solution_str", "label", "answer", "ground_truth"}
_IN_PLACE = _TEXTS | {"prompts", "completions", "responses"}
"""Names of texts, which a run never passes as the first two arguments."""
_READS_MESSAGES = re.compile(r"""\[\s*["']content["']\s*\]|\.get\(\s*["']content["']""")


@dataclass(frozen=True)
class OtherTrainer:
    """The rewards of another project, which are recognised by their parameters."""

    name: str
    gives: tuple[frozenset[str], ...]
    """Sets of parameter names. A function that has all names of a set is such a reward."""


OTHERS = (
    OtherTrainer("OpenRLHF", (frozenset({"queries", "prompts"}), frozenset({"queries", "labels"}))),
    OtherTrainer("TRL", (frozenset({"completions"}), frozenset({"completion_ids"}))),
    OtherTrainer(
        "verl",
        (
            frozenset({"solution_str"}),
            frozenset({"solution_strs"}),
            frozenset({"data_source", "ground_truth"}),
            frozenset({"reward_input"}),
            frozenset({"reward_inputs"}),
        ),
    ),
)


def description(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Returns the kind of foreign reward with these parameters, or None for a reward of this project."""
    names = set(parameters)
    first = list(parameters)[:2]
    if not {"args", "sample"} & names:
        for other in OTHERS:
            if any(given <= names for given in other.gives):
                return f"is a reward function of {other.name}"
    if _IN_PLACE.intersection(first):
        return "takes texts in place of the flags and the sample"
    return None


def expression(
    function: Callable[..., object],
    parameters: Mapping[str, inspect.Parameter],
    columns: Mapping[str, str],
) -> str:
    """Returns an expression of our `sample` that calls the foreign reward `f` with one response.

    `columns`: values of the columns of the data that are not in the metadata, such as {"solution": "sample.label"}.
    """
    lists = any(name in _LISTS or name in ("completion_ids", "prompts") for name in parameters)
    given = list(_arguments(function, parameters, columns, lists))
    by_name = "completions" in parameters or "completion_ids" in parameters
    words, skipped = list[str](), False
    for name, value in given:
        if name and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
            skipped = True
        if value is None:
            skipped = True
        elif name and (by_name or skipped):
            words.append(f"{name}={value}")
        else:
            words.append(value)
    call = f"f({', '.join(words)})"
    if inspect.iscoroutinefunction(function):
        call = f"(await {call})"
    if lists and "queries" in parameters and _names(function, "rewards"):
        call += '["rewards"]'
    return f"{call}[0]" if lists else call


def _arguments(
    function: Callable[..., object],
    parameters: Mapping[str, inspect.Parameter],
    columns: Mapping[str, str],
    lists: bool,
) -> Iterator[tuple[str, str | None]]:
    """Yields (name, value) for each argument. A value of None means the argument's default. Arguments without a name
    come last."""
    known = _known(function, parameters, columns)
    rest = next((one for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD), None)
    label = next((name for name, value in columns.items() if value == "sample.label"), None)
    defaults = dict[str, str]()
    for name, one in parameters.items():
        if one.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        value = known.get(name)
        if value is None and one.default is inspect.Parameter.empty:
            is_label = label is not None and "sample.label" not in known.values()
            if rest is not None and lists:  # the whole metadata follows
                defaults |= {name: "sample.label"} if is_label else {}
            else:
                value = (
                    f'sample.metadata.get("{name}", sample.label)'
                    if is_label
                    else f'sample.metadata["{name}"]'
                )
        yield name, f"[{value}]" if lists and value is not None else value
    if rest is None or not lists:
        return
    if label is not None and label.isidentifier() and label not in parameters:
        yield "", f"{label}=[sample.label]"
    metadata = "{k: [v] for k, v in sample.metadata.items()}"
    if defaults:
        first = ", ".join(f'"{name}": [{value}]' for name, value in defaults.items())
        metadata = f"{{{first}, **{metadata}}}"
    yield "", f"**{metadata}"


def _known(
    function: Callable[..., object], parameters: Mapping[str, inspect.Parameter], columns: Mapping[str, str]
) -> dict[str, str]:
    """Returns the values of the parameters whose names show their meaning."""
    own = {**_VALUES, **{plural: _VALUES[name] for plural, name in _PLURALS.items()}}
    if not {"response", "completion", "solution_str", "completions", "responses"} & set(parameters):
        own["answer"] = "sample.response"
    if reads_messages(function):
        own |= dict.fromkeys(("completion", "completions"), _MESSAGES)
        own |= dict.fromkeys(("prompt", "prompts"), _PROMPT_MESSAGES)
    return {name: columns.get(name, own.get(name, "")) for name in parameters if name in {**own, **columns}}


def reads_messages(function: Callable[..., object]) -> bool:
    """Returns True if the function, or a function of its module that it names, reads the content of chat messages."""
    return any(_READS_MESSAGES.search(text) for text in _sources(function))


def _names(function: Callable[..., object], key: str) -> bool:
    """Returns True if the source contains this text."""
    return any(f'"{key}"' in text or f"'{key}'" in text for text in _sources(function))


def _sources(function: Callable[..., object]) -> Iterator[str]:
    """Yields the text of a function, and of the functions of its module that it names."""
    function = inspect.unwrap(function)
    code, others = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    helpers = [others.get(name) for name in _words(code)] if code is not None else []
    read: list[Callable[..., object]] = [function]
    read += [one for one in helpers if inspect.isfunction(one) and one.__globals__ is others]
    for one in read:
        with contextlib.suppress(OSError, TypeError):  # a function without a file
            yield inspect.getsource(one)


def _words(code: CodeType) -> set[str]:
    """Returns the names that a function reads, also those of the functions inside it."""
    inner = [_words(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)
