"""Tests spans of samples that a collector receives, the slowest sample of a group, and memory snapshots of a GPU."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from rollout_double import make_args, make_state

from slime.config import Config
from slime.plug_ins.spans import (
    bind_trace,
    build_sglang_meta_trace_attrs,
    trace_event,
    trace_function,
    trace_span,
)
from slime.rules.data import check_memory_history
from slime.rules.packages import check_packages
from slime.tracking.traces import sample_spans
from slime.tracking.traces.sample_spans import PROTOCOL_VARIABLE, SampleSpans
from slime.types import Sample


class Collector:
    """A server that receives OTLP over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


META = {"prompt_tokens": 4, "id": "r1", "finish_reason": {"type": "stop"}}


def sample(index: int, tokens: int = 3) -> Sample:
    made = Sample(index=index, group_index=4, prompt="2+2=", session_id=f"rollout/{index}")
    made.tokens, made.response_length = list(range(9)), tokens
    made.status = Sample.Status.COMPLETED
    return made


def test_a_collector_gets_a_span_of_each_sample(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    spans, one, late = SampleSpans(collector.url), sample(7), sample(8)
    with spans.around(one, 2, False) as done:
        one.reward = 1.0
        one.weight_versions = [2, 3]
        done(one)
    with spans.around(late, 2, False) as done:
        done([sample(8, 5), sample(9, 6)])
    with pytest.raises(RuntimeError), spans.around(sample(10), 2, True):
        raise RuntimeError("the reward failed")
    spans.close()
    found = [{pair.key: pair.value for pair in span.attributes} | {"": span} for span in collector.spans]
    assert [fields["vime.sample"].int_value for fields in found] == [7, 8, 10]
    assert {fields["vime.group"].int_value for fields in found} == {4}
    assert found[0]["vime.reward"].double_value == 1.0 and found[0]["vime.rollout"].int_value == 2
    assert [v.int_value for v in found[0]["vime.weight_versions"].array_value.values] == [2, 3]
    assert found[1]["gen_ai.usage.output_tokens"].int_value == 11 and found[1]["vime.samples"].int_value == 2
    assert found[2]["vime.evaluation"].bool_value and found[2]["vime.samples"].int_value == 0
    assert all(f[""].end_time_unix_nano >= f[""].start_time_unix_nano > 1e18 for f in found)


@trace_function("judge", target="judged", attrs_getter=lambda judged, level: {"level": level})
async def judge(judged: Sample, level: int) -> float:
    trace_event(judged, "asked", attrs={"words": ["a", "b"]})
    return 0.5


@trace_function("both")
def both(group: list[Sample]) -> int:
    return len(group)


def test_spans_of_a_plug_in_are_below_its_sample(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime's trace_span, trace_event and trace_function."""
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    one = sample(7)

    async def generate() -> None:
        with state.spans.around(one, 2, False) as done:
            with trace_span(one, "tool", attrs={"name": "python"}) as span:
                span.set("exit_code", 0).update(build_sglang_meta_trace_attrs(META))
                assert await judge(one, level=3) == 0.5
            assert both([one, sample(8)]) == 2
            done(one)

    args = make_args()
    args.otlp_traces_endpoint = collector.url
    state = make_state(args)
    state.run(generate())
    with pytest.raises(KeyError), trace_span(bind_trace(one), "fails"):
        raise KeyError("no such tool")
    state.close()
    spans = {span.name: span for span in collector.spans}
    fields = {name: {pair.key: pair.value for pair in span.attributes} for name, span in spans.items()}
    assert spans.keys() == {"sample", "tool", "judge", "both", "fails"}
    parent = {name: span.parent_span_id for name, span in spans.items()}
    assert (
        parent["tool"] == parent["both"] == spans["sample"].span_id
        and parent["judge"] == spans["tool"].span_id
    )
    assert parent["sample"] == parent["fails"] == b""
    assert (fields["tool"]["name"].string_value, fields["tool"]["finish_reason"].string_value) == (
        "python",
        "stop",
    )
    assert fields["tool"]["prompt_tokens"].int_value == 4 and "exit_code" in fields["tool"]
    assert fields["judge"]["level"].int_value == 3 and fields["judge"]["vime.sample"].int_value == 7
    assert [event.name for event in spans["judge"].events] == ["asked"]
    assert fields["both"]["vime.samples"].int_value == 2 and fields["both"]["vime.group"].int_value == 4
    assert [event.name for event in spans["fails"].events] == ["exception"]
    with pytest.raises(ValueError, match="target must be a parameter of .*both, got 'sampel'"):
        trace_function("x", target="sampel")(both)


def test_without_an_endpoint_plug_ins_run_without_spans() -> None:
    with trace_span(sample(1), "tool") as span:
        span.set("a", 1)
    assert asyncio.run(judge(sample(1), 2)) == 0.5 and both([sample(1)]) == 1
    state = make_state(make_args())
    assert asyncio.run(judge(sample(1), 2)) == 0.5 and both([]) == 0
    state.close()


def test_the_slowest_sample_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 2.0, 5.5, 6.0, 7.0))
    monkeypatch.setattr(sample_spans.time, "perf_counter", lambda: next(clock))
    spans, group = SampleSpans(), [sample(1), sample(2, 5), sample(3)]
    for one in group:
        with spans.around(one, 0, False) as done:
            done(one)
    assert spans.slowest(group) == {"sample": 2, "seconds": 3.5, "tokens": 5}
    assert spans.slowest(group) == {}, "the times are forgotten"


def test_an_endpoint_needs_the_packages_and_a_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.rules.packages.is_installed", lambda name: False)
    with pytest.raises(ValueError, match="--otlp-traces-endpoint must have the package opentelemetry-sdk"):
        check_packages(Config.from_flat({"otlp_traces_endpoint": "http://localhost:4317"}))
    monkeypatch.setenv(PROTOCOL_VARIABLE, "smoke")
    with pytest.raises(ValueError, match=f"{PROTOCOL_VARIABLE} must be grpc or http/protobuf, got smoke"):
        SampleSpans("http://localhost:4317")


def test_memory_history_is_of_gpus_that_train() -> None:
    flags: dict[str, object] = {"record_memory_history": True, "device": "cuda"}
    check_memory_history(Config.from_flat(flags))
    check_memory_history(Config.from_flat({"device": "cpu"}))
    with pytest.raises(ValueError, match="--record-memory-history must be used on GPUs, got --device cpu"):
        check_memory_history(Config.from_flat(flags | {"device": "cpu"}))
    with pytest.raises(ValueError, match="must not be combined with --debug-rollout-only"):
        check_memory_history(Config.from_flat(flags | {"debug_rollout_only": True}))
