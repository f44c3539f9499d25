"""Spans and events of a plug-in, for OpenTelemetry: tool calls, verifiers, sandboxes. slime's trace_utils has these
names.

    with trace_span(sample, "tool", attrs={"name": "python"}) as span:
        result = await run_tool(code)
        span.set("exit_code", result.code)

--otlp-traces-endpoint URL sends the spans as children of the span `sample` (slime.tracking.traces.sample_spans).
Nothing is recorded without the flag, and in a process without a rollout.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

from slime.hooks import Hook
from slime.rollout.state import entered
from slime.system.upstream import refused_names
from slime.tracking.traces.sample_spans import Attributes, OpenSpan
from slime.types import Sample

__getattr__ = refused_names("slime.plug_ins.spans")
F = TypeVar("F", bound=Hook)
_META = ("prompt_tokens", "completion_tokens", "cached_tokens", "weight_version")


@dataclass
class TraceHandle:
    """The sample of a span, for code that does not have the sample."""

    sample_id: int | None = None
    group_id: int | None = None


Target: TypeAlias = "Sample | TraceHandle | Sequence[Target]"


@dataclass
class SpanContext:
    """An open span. `set` and `update` add attributes, which the span has when it ends."""

    target: Target
    span: OpenSpan | None = None
    attrs: dict[str, object] = field(default_factory=dict)

    def set(self, key: str, value: object) -> SpanContext:
        """Sets one attribute."""
        return self.update({key: value})

    def update(self, attrs: Attributes | None) -> SpanContext:
        """Sets several attributes."""
        self.attrs |= attrs or {}
        if self.span is not None:
            self.span.set(attrs or {})
        return self

    set_attr, update_attrs = set, update


def bind_trace(sample: Sample) -> TraceHandle:
    """Returns a target for code that does not have the sample, such as a client of a tool."""
    return TraceHandle(sample.index, sample.group_index)


@contextmanager
def trace_span(
    target: Target, name: str, *, attrs: Attributes | None = None, record_error: bool = True
) -> Iterator[SpanContext]:
    """Measures the block as a span `name` with the attributes `attrs`, the sample and the group of `target`.

    An error of the block ends the span with the status ERROR. `record_error` adds the type and the text of the error.
    """
    run = entered()
    if run is None:
        yield SpanContext(target)
        return
    with run.spans.inside(name, {**_fields(target), **(attrs or {})}, record_error=record_error) as span:
        yield SpanContext(target, span)


def trace_event(target: Target, name: str, *, attrs: Attributes | None = None) -> None:
    """Adds an event to the span that is open in this task: that of `trace_span`, or that of the sample."""
    if (run := entered()) is not None:
        run.spans.add_event(name, {**_fields(target), **(attrs or {})})


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Target | None] | None = None,
    attrs_getter: Callable[..., Attributes | None] | None = None,
    record_error: bool = True,
) -> Callable[[F], F]:
    """Returns a decorator that runs a function, or a coroutine function, in a span `name`.

    The span's target is the argument with the name `target`, or the result of `target_getter`, which gets the arguments
    of the call, as `attrs_getter` does. Without both, the target is the first argument that is a sample or a list of
    samples. Raises ValueError if the function has no parameter `target`.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        if target is not None and target not in signature.parameters:
            raise ValueError(
                f"target must be a parameter of {function.__qualname__}, got {target!r}; it has "
                f"{', '.join(signature.parameters)}"
            )

        def open_span(*args: object, **kwargs: object) -> object:
            found = _find_target(signature.bind_partial(*args, **kwargs).arguments, target)
            if target_getter is not None:
                found = target_getter(*args, **kwargs)
            attrs = None if attrs_getter is None else attrs_getter(*args, **kwargs)
            return trace_span([] if found is None else found, name, attrs=attrs, record_error=record_error)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: object, **kwargs: object) -> object:
                with open_span(*args, **kwargs):  # type: ignore[attr-defined]
                    return await function(*args, **kwargs)

            return cast(F, awaited)

        @functools.wraps(function)
        def called(*args: object, **kwargs: object) -> object:
            with open_span(*args, **kwargs):  # type: ignore[attr-defined]
                return function(*args, **kwargs)

        return cast(F, called)

    return decorate


def build_sglang_meta_trace_attrs(meta: Mapping[str, object]) -> dict[str, object]:
    """Returns the attributes of a span from an answer's `meta_info`: numbers of tokens, weight version, request and
    finish reason."""
    attrs = {key: meta[key] for key in _META if meta.get(key) is not None}
    if meta.get("id") is not None:
        attrs["request_id"] = meta["id"]
    reason = meta.get("finish_reason")
    if reason is not None:
        attrs["finish_reason"] = reason["type"] if isinstance(reason, Mapping) else reason
    return attrs


build_vllm_meta_trace_attrs = build_sglang_meta_trace_attrs


def _find_target(arguments: Mapping[str, object], name: str | None) -> Target | None:
    if name is not None:
        return cast("Target | None", arguments.get(name))
    targets = [value for value in arguments.values() if _samples(value)]
    return cast("Target", targets[0]) if targets else None


def _samples(target: object) -> list[Sample | TraceHandle]:
    if isinstance(target, Sample | TraceHandle):
        return [target]
    return [one for part in target for one in _samples(part)] if isinstance(target, list | tuple) else []


def _fields(target: Target) -> dict[str, object]:
    """Returns the attributes of a target. A span of several samples has their number and their group."""
    handles = [bind_trace(one) if isinstance(one, Sample) else one for one in _samples(target)]
    if not handles:
        return {}
    fields: dict[str, object] = {"vime.group": handles[0].group_id}
    return fields | (
        {"vime.sample": handles[0].sample_id} if len(handles) == 1 else {"vime.samples": len(handles)}
    )
