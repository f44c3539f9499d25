"""Recognises rewards that were written for another trainer by their parameters, and calls them as that trainer does.

`adapted` turns such a reward into a function of this project's form. Each other trainer is one line of `OTHERS`, and
each other name of a parameter is one line of `_VALUES`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import numbers
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from slime.config.sections.reward import is_hook, reward_names
from slime.hooks import load_function
from slime.records.errors import FlagError

if TYPE_CHECKING:
    from slime.types import Sample

RAW_PROMPT = "raw_prompt"
"""Key in `Sample.metadata` for the prompt as the row has it, before the chat template."""
NOT_SCORED = float("nan")
"""The number of a reward of TRL that returned None: the reward does not apply to the response. A sum of several rewards
leaves out this object. A sample without any other reward is not trained on."""
PARTS = "reward_parts"
"""Key in `Sample.metadata` for a dict that maps the name of every part of a reward to its number."""
_SCORE = "score"
"""Entry on which verl trains, if a reward returns a dict."""


@dataclass(frozen=True)
class RewardColumns:
    """The columns of the prompt and of the label in the user's data."""

    input_key: str | None = None
    label_key: str | None = None

    def values(self, sample: Sample) -> dict[str, object]:
        """Returns every column of the row under its own name."""
        found = {name: value for name, value in sample.metadata.items() if name not in (RAW_PROMPT, PARTS)}
        if self.input_key:
            found[self.input_key] = _raw(sample)
        if self.label_key and "." not in self.label_key:
            found[self.label_key] = sample.label
        return found


Text: TypeAlias = "Callable[[Sample], str] | None"
"""Returns the response without special tokens. None leaves the response as it is."""


def _plain(sample: Sample, plain_text: Text) -> Sample:
    """Returns the sample, or a copy of it with the text that other trainers pass as the response."""
    if plain_text is None or (text := plain_text(sample)) == sample.response:
        return sample
    view = copy.copy(sample)
    view.response = text
    return view


def _raw(sample: Sample) -> object:
    return sample.metadata.get(RAW_PROMPT, sample.prompt)


def _record(sample: Sample) -> object:
    length = sample.response_length
    return {"response": sample.response, "response_length": length, "ground_truth": sample.label}


def _extra_info(sample: Sample) -> object:
    info = sample.metadata.get("extra_info")
    return sample.metadata if info is None else info


_VALUES: dict[str, Callable[[Sample], object]] = {
    "prompt": _raw,
    "query": lambda sample: f"{sample.prompt}{sample.response}",
    "response": lambda sample: sample.response,
    "completion": lambda sample: sample.response,
    "solution_str": lambda sample: sample.response,
    "completion_ids": lambda sample: sample.tokens[len(sample.tokens) - sample.response_length :],
    "label": lambda sample: sample.label,
    "answer": lambda sample: sample.label,
    "ground_truth": lambda sample: sample.label,
    "data_source": lambda sample: sample.metadata.get("data_source"),
    "extra_info": _extra_info,
    "reward_input": _record,
    "sample": lambda sample: sample,
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
_RESPONSES = {"response", "completion", "solution_str", "completions", "responses"}
_LABELS = {"label", "labels", "answer", "answers", "ground_truth", "ground_truths"}
_TEXTS = {"prompt", "response", "completion", "solution_str", "label", "answer", "ground_truth"}
_STANDARD_NAMES = _TEXTS | {"prompts", "completions", "responses"}
"""Names of texts, which a run never passes as the first two arguments."""


@dataclass(frozen=True)
class OtherTrainer:
    """The rewards of another project, which are recognised by their parameters."""

    name: str
    signatures: tuple[frozenset[str], ...]
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


def is_foreign(function: Callable[..., object]) -> bool:
    """Returns True for a reward in another trainer's form, or with texts instead of the flags and the sample."""
    parameters = read_parameters(function)
    if parameters is None or inspect.isclass(function):
        return False
    names = set(parameters)
    if not {"args", "sample", "samples"} & names and any(
        form <= names for other in OTHERS for form in other.signatures
    ):
        return True
    return bool(_STANDARD_NAMES.intersection(list(parameters)[:2]))


def any_foreign(custom_rm_path: str | None, rm_type: object) -> bool:
    """Returns True if a reward of the run is a reward of another trainer. A function that cannot be loaded does not
    count, because another check reports it."""
    paths = [custom_rm_path] if custom_rm_path else filter(is_hook, reward_names(rm_type))
    for path in paths:
        with contextlib.suppress(ValueError):
            if is_foreign(load_function(path)):
                return True
    return False


def read_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter] | None:
    """Returns the parameters, or None for a function of C, which may have no signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return None


_ADAPTED: dict[tuple[int, RewardColumns], tuple[object, Callable[..., Any]]] = {}
"""Maps (identity of a function, columns) to the function, which stays alive here, and its adapted form."""


def adapted(function: Callable[..., Any], columns: RewardColumns) -> Callable[..., Any]:
    """Returns the reward as f(args, sample) -> float | dict, or f(args, samples) -> list, from any trainer's form.

    A reward of this project is returned unchanged. The form is derived once per function.
    """
    key = id(function), columns
    if key not in _ADAPTED:
        made = _adapt(ForeignReward(function, columns)) if is_foreign(function) else function
        _ADAPTED[key] = function, made
    return _ADAPTED[key][1]


def _adapt(reward: ForeignReward) -> Callable[..., Any]:
    function = reward.function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object whose call is async
    ):

        async def awaited(
            hook_args: object, received: Sample | list[Sample], plain_text: Text = None, **kwargs: object
        ) -> object:
            samples = received if isinstance(received, list) else [received]
            found = [
                reward.read_numbers(hook_args, one, await function(*positional, **words))
                for one, positional, words in reward.calls(hook_args, samples, plain_text)
            ]
            return _as_received(found, received)

        return awaited

    def called(
        hook_args: object, received: Sample | list[Sample], plain_text: Text = None, **kwargs: object
    ) -> object:
        samples = received if isinstance(received, list) else [received]
        found = [
            reward.read_numbers(hook_args, one, function(*positional, **words))
            for one, positional, words in reward.calls(hook_args, samples, plain_text)
        ]
        return _as_received(found, received)

    return called


def _as_received(found: list[list[object]], received: Sample | list[Sample]) -> object:
    flat = [value for part in found for value in part]
    return flat if isinstance(received, list) else flat[0]


class ForeignReward:
    """A reward of another trainer: the arguments of its calls, and the numbers in its results."""

    def __init__(self, function: Callable[..., Any], columns: RewardColumns) -> None:
        self.function, self.columns = function, columns
        self._parameters = read_parameters(function) or {}
        names = set(self._parameters)
        self.is_batched = any(name in _LISTS or name in ("completion_ids", "prompts") for name in names)
        self._is_trl = bool({"completions", "completion_ids"} & names) and "queries" not in names
        self._reads_messages = reads_messages(function)
        self._takes_rest = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in self._parameters.values())

    def calls(
        self, hook_args: object, samples: Sequence[Sample], plain_text: Text = None
    ) -> Iterator[tuple[Sequence[Sample], list[object], dict[str, object]]]:
        """Yields (samples, positional arguments, named arguments) for each call: one call for all samples of a reward
        that takes lists, else one call per sample."""
        if not self.is_batched:
            for sample in samples:
                yield (
                    [sample],
                    *self._placed(self._arguments(_plain(sample, plain_text)) | {"args": hook_args}),
                )
            return
        each = [self._arguments(_plain(sample, plain_text)) for sample in samples]
        names = dict.fromkeys(name for values in each for name in values)
        words: dict[str, object] = {name: [values.get(name) for values in each] for name in names}
        if "args" in self._parameters:
            words["args"] = hook_args
        if self._is_trl:
            words |= _trainer(hook_args, samples)
        yield samples, *self._placed(words)

    def _placed(self, values: Mapping[str, object]) -> tuple[list[object], dict[str, object]]:
        """Divides values by parameter name into positional and named arguments."""
        positional, words = list[object](), dict(values)
        for name, one in self._parameters.items():
            if one.kind is inspect.Parameter.POSITIONAL_ONLY and name in words:
                positional.append(words.pop(name))
        if not (self._takes_rest and self.is_batched):
            words = {name: value for name, value in words.items() if name in self._parameters}
        return positional, words

    def _arguments(self, sample: Sample) -> dict[str, object]:
        """Returns the arguments for one response by parameter. A parameter that keeps its default is left out."""
        row, known = self.columns.values(sample), self._known(sample)
        texts = {name: known[name] for name in _OF_TRL if name in known}
        own = {name: row[name] for name in (self.columns.input_key, self.columns.label_key) if name in row}
        # TRL passes the columns under their own names, so `answer` is a column there
        values = ChainMap(texts, row, known) if self._is_trl else ChainMap(own, known, row)
        found = dict[str, object]()
        for name, one in self._parameters.items():
            if one.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                continue
            if name in values:
                found[name] = values[name]
            elif one.default is inspect.Parameter.empty and name not in ("args", *_TRAINER):
                found[name] = self._label(name, sample, row)
        if self._takes_rest and self.is_batched:
            rest = {name: value for name, value in row.items() if name not in _NEVER} if self._is_trl else row
            return {**(texts if self._is_trl else {}), **rest, **found}
        return found

    def _label(self, name: str, sample: Sample, row: Mapping[str, object]) -> object:
        """Returns the label for a required parameter that is no column, if no other parameter has the label."""
        others = {*_LABELS} - ({*row} if self._is_trl else set()) | {self.columns.label_key}
        if sample.label is None or others & self._parameters.keys():
            raise FlagError(
                f"parameter {name} of the reward",
                "be a column of the data",
                f"the columns {', '.join(sorted(row)) or 'none'}",
                "rename the parameter or the column",
            )
        return sample.label

    def _known(self, sample: Sample) -> dict[str, object]:
        """Returns the values of the names that show their meaning."""
        own = {**_VALUES, **{plural: _VALUES[name] for plural, name in _PLURALS.items()}}
        if not _RESPONSES & self._parameters.keys():
            own["answer"] = own["response"]
        if self._gets_messages(sample):
            own |= dict.fromkeys(("completion", "completions"), _response_messages)
            own |= dict.fromkeys(("prompt", "prompts"), _prompt_messages)
        always = ("prompts", "completions", "completion_ids") if self._is_trl else ()
        return {
            name: value(sample) for name, value in own.items() if name in self._parameters or name in always
        }

    def _gets_messages(self, sample: Sample) -> bool:
        """Returns True if the reward gets chat messages: TRL passes messages if the prompt of the row has messages."""
        return self._reads_messages or (self._is_trl and isinstance(_raw(sample), list))

    def read_numbers(self, hook_args: object, samples: Sequence[Sample], result: Any) -> list[object]:
        """Returns the rewards of a call's samples. Raises ValueError for a result of another length."""
        if not self.is_batched:
            return [_number(result, samples[0], getattr(hook_args, "reward_key", None))]
        if isinstance(result, dict) and "rewards" in result:
            result = result["rewards"]
        if hasattr(result, "tolist"):  # an array or a tensor
            result = result.tolist()
        if not isinstance(result, list | tuple) or len(result) != len(samples):
            got = f"{len(result)}" if isinstance(result, list | tuple) else f"a {type(result).__name__}"
            raise FlagError(
                "the reward", f"return a list of {len(samples)} rewards", got, "return one per completion"
            )
        key = getattr(hook_args, "reward_key", None)
        return [_number(value, sample, key) for value, sample in zip(result, samples, strict=True)]


_TRAINER = ("trainer_state", "log_extra", "log_metric")
_OF_TRL = ("prompts", "completions", "completion_ids")
"""Arguments that TRL always passes, before the columns of the data."""
_NEVER = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass."""


def _trainer(hook_args: object, samples: Sequence[Sample]) -> dict[str, object]:
    """Returns TRL's further arguments. The state has the rollout's number as the step. The functions that log store
    their values with the samples."""
    step = next((sample.rollout_id for sample in samples if sample.rollout_id is not None), 0)
    state = SimpleNamespace(
        global_step=step, max_steps=getattr(hook_args, "num_rollout", None), epoch=0.0, log_history=[]
    )

    def log_extra(column: str, values: Sequence[object]) -> None:
        for sample, value in zip(samples, values, strict=True):
            sample.metadata = {**sample.metadata, column: value}

    def log_metric(name: str, value: float) -> None:
        for sample in samples:
            parts = {**sample.metadata.get(PARTS, {}), name: float(value)}
            sample.metadata = {**sample.metadata, PARTS: parts}

    return dict(zip(_TRAINER, (state, log_extra, log_metric), strict=True))


def _number(value: Any, sample: Sample, key: str | None) -> object:
    """Returns one reward: None of TRL as NOT_SCORED, a dict of verl by its entry `score` unless --reward-key names an
    entry, and a number of numpy or torch as a number. The other numbers of a dict become parts of the reward."""
    if value is None:
        return NOT_SCORED
    if isinstance(value, dict) and key is None and _SCORE in value:
        parts = {name: float(one) for name, one in value.items() if isinstance(one, numbers.Real)}
        parts.pop(_SCORE, None)
        sample.metadata = {**sample.metadata, PARTS: parts}
        return value[_SCORE]
    return value.item() if hasattr(value, "item") else value


def _response_messages(sample: Sample) -> object:
    return [{"role": "assistant", "content": sample.response}]


def _prompt_messages(sample: Sample) -> object:
    raw = _raw(sample)
    return raw if isinstance(raw, list) else [{"role": "user", "content": raw}]


def reads_messages(function: Callable[..., object]) -> bool:
    """Returns True if the function, or a function of its module that it names, reads the entry `content` of chat
    messages. The compiled code shows it, because a function of a notebook has no file in another process."""
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):  # an object, or a method
        own_call = getattr(type(function), "__call__", function)  # noqa: B004
        function = getattr(function, "__func__", own_call)
    code, others = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None:
        return False
    helpers = [others.get(name) for name in _list_entries(code, "co_names")]
    read = [one for one in helpers if inspect.isfunction(one) and one.__globals__ is others]
    codes = [code, *(one.__code__ for one in read)]
    return any("content" in _list_entries(one, "co_consts") for one in codes)


def _list_entries(code: CodeType, table: str) -> list[object]:
    """Returns the entries of a table of the compiled code, also those of the functions inside it."""
    inner = [_list_entries(one, table) for one in code.co_consts if isinstance(one, CodeType)]
    return [*getattr(code, table), *(entry for part in inner for entry in part)]
