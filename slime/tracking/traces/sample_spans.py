"""Measures every sample's time: the slowest sample of a group for the journal, and a span per sample for OpenTelemetry.

--otlp-traces-endpoint URL sends the spans. A span "sample" begins when the sample may be generated, and ends when it
has its reward, so it contains the wait for the engines. Spans of a plug-in (slime.plug_ins.spans) are its children.
The variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL chooses the protocol, as in other programs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from slime.types import Sample, SampleGroup

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

Attributes: TypeAlias = Mapping[str, object]
Result: TypeAlias = "Sample | list[Sample]"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE, TRACER = "vime-rollout", "vime"
_EVERY_MS = 500
"""Milliseconds between two transfers. A killed process loses the spans of that time."""


class OpenSpan:
    """A span of OpenTelemetry that has not ended."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def set(self, attributes: Attributes) -> None:
        """Sets attributes. None is left out, and an object that OpenTelemetry does not have is sent as JSON."""
        self._span.set_attributes(_plain(attributes))


class SampleSpans:
    """Measures the samples of a rollout manager. `endpoint`: address for spans, such as http://localhost:4317, or None
    for no spans."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._provider = None if endpoint is None else _provider(endpoint)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def around(
        self, sample: Sample, rollout_id: int | None, evaluation: bool
    ) -> Iterator[Callable[[Result], None]]:
        """Records the generation and scoring of the sample in this context. The block calls the yielded function with
        the result."""
        began_ns, began, made = time.time_ns(), time.perf_counter(), list[Sample]()

        def done(result: Result) -> None:
            made.extend(result if isinstance(result, list) else [result])

        span = None
        try:
            with self._current(began_ns) as span:
                yield done
        finally:
            if not evaluation and sample.session_id is not None:
                self._seconds[sample.session_id] = time.perf_counter() - began
            if span is not None:
                self._end(span, sample, made, rollout_id, evaluation)

    @contextmanager
    def inside(
        self, name: str, attributes: Attributes, *, record_error: bool = True
    ) -> Iterator[OpenSpan | None]:
        """Opens a span `name` of a plug-in, below the span that is open in this task. Yields None without an
        endpoint."""
        if self._provider is None:
            yield None
            return
        tracer = self._provider.get_tracer(TRACER)
        with tracer.start_as_current_span(name, record_exception=record_error) as span:
            opened = OpenSpan(span)
            opened.set(attributes)
            yield opened

    def add_event(self, name: str, attributes: Attributes) -> None:
        """Adds an event to the span that is open in this task. Does nothing without an endpoint."""
        if self._provider is not None:
            from opentelemetry.trace import get_current_span

            get_current_span().add_event(name, _plain(attributes))

    def slowest(self, group: SampleGroup) -> dict[str, object]:
        """Returns the fields of an `ended` event, with the slowest sample of the group. Discards the group's times."""
        times = [self._seconds.pop(sample.session_id or "", -1.0) for sample in group]
        seconds = max(times, default=-1.0)
        if seconds < 0:
            return {}
        sample = group[times.index(seconds)]
        return {"sample": sample.index, "seconds": round(seconds, 3), "tokens": sample.response_length}

    def close(self) -> None:
        """Sends the waiting spans. An endpoint that does not answer delays the end by a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()

    @contextmanager
    def _current(self, began_ns: int) -> Iterator[Span | None]:
        """Makes a new span "sample" the parent of other spans in this context. The caller ends the span."""
        if self._provider is None:
            yield None
            return
        from opentelemetry.trace import use_span

        span = self._provider.get_tracer(TRACER).start_span("sample", start_time=began_ns)
        with use_span(span, record_exception=False, set_status_on_exception=False):
            yield span

    def _end(
        self, span: Span, sample: Sample, made: Sequence[Sample], rollout_id: int | None, evaluation: bool
    ) -> None:
        fields: dict[str, object] = {
            "vime.rollout": rollout_id,
            "vime.group": sample.group_index,
            "vime.sample": sample.index,
            "vime.evaluation": evaluation,
            "vime.samples": len(made),
            "gen_ai.usage.output_tokens": sum(one.response_length for one in made),
        }
        if len(made) == 1:
            (one,) = made
            fields |= {"vime.status": one.status.value, "vime.weight_versions": list(one.weight_versions)}
            if isinstance(one.reward, int | float):
                fields["vime.reward"] = float(one.reward)
        OpenSpan(span).set(fields)
        span.end()


def _plain(attributes: Attributes) -> dict[str, AttributeValue]:
    def plain(value: object) -> AttributeValue:
        if isinstance(value, str | int | float):
            return value
        for kind in (str, int, float):
            if isinstance(value, list) and all(type(part) is kind for part in value):
                return value
        return json.dumps(value, default=str)

    return {name: plain(value) for name, value in attributes.items() if value is not None}


def _provider(endpoint: str) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
    exporter = _exporter(endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EVERY_MS))
    return provider


def _exporter(endpoint: str) -> SpanExporter:
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint=endpoint)
    raise ValueError(f"{PROTOCOL_VARIABLE} must be grpc or http/protobuf, got {protocol}; set one of them")
