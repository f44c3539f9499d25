"""Tests counts, reasons and milliseconds of the operators' calls."""

import time

import pytest
import torch

from rl_kernel import configure, linear_logp, logp, masked_sum, telemetry
from rl_kernel.dispatch import Choice, Refused
from rl_kernel.mode import using
from rl_kernel.telemetry import record, record_variant, set_timing, timed

ON_HOST = "the tensors are on cpu and the kernels need a CUDA device"
HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    telemetry(reset=True)
    yield
    set_timing(False)
    configure()
    telemetry(reset=True)


def call(tokens, **kwargs):
    return logp(torch.zeros(tokens, 5), torch.zeros(tokens, dtype=torch.int64), **kwargs)


def test_nothing_was_called():
    assert telemetry() == {}


def test_calls_tokens_and_implementations():
    record(Choice("logp", "triton"), 7)
    record(Choice("logp", "triton"), 5)
    record(Choice("ratio_kl", "reference", "the mode is off"), 3)
    record_variant("logp", "wide")
    none = {"variants": {}, "fallbacks": {}, "ms": 0.0}
    assert telemetry() == {
        "logp": {**none, "calls": 2, "tokens": 12, "implementations": {"triton": 2}, "variants": {"wide": 1}},
        "ratio_kl": {**none, "calls": 1, "tokens": 3, "implementations": {"reference": 1}},
    }


def test_fallbacks_are_counted_by_reason():
    for reason in ("odd", "even", "odd"):
        record(Choice("logp", "reference", reason, fallback=True), 1)
    record(Choice("logp", "triton"), 1)
    counts = telemetry()["logp"]
    assert counts["fallbacks"] == {"odd": 2, "even": 1}
    assert counts["implementations"] == {"reference": 3, "triton": 1}


def test_reset_starts_again_and_a_result_is_a_copy():
    record(Choice("logp", "triton"), 1)
    before = telemetry(reset=True)
    assert before["logp"]["calls"] == 1 and telemetry() == {}
    record(Choice("logp", "triton"), 1)
    now = telemetry()
    now["logp"]["fallbacks"]["odd"] = 1
    record(Choice("logp", "triton"), 1)
    assert telemetry()["logp"]["calls"] == 2 and telemetry()["logp"]["fallbacks"] == {}


def test_an_operator_says_what_it_did():
    call(4)
    call(0)
    with using("off"):
        call(2)
    with using("auto", ["ratio_kl"]):
        call(1)
    call(3, impl="reference")
    linear_logp(torch.zeros(6, 2), torch.zeros(5, 2), torch.zeros(6, dtype=torch.int64))
    masked_sum(torch.ones(8), torch.ones(8))
    counts = telemetry()
    assert counts["logp"]["calls"] == 5 and counts["logp"]["tokens"] == 10
    assert counts["logp"]["implementations"] == {"reference": 5}
    # A call is a fallback only if the mode asked for a fast implementation and the reference ran.
    assert counts["logp"]["fallbacks"] == {ON_HOST: 2}
    assert counts["linear_logp"]["tokens"] == 6 and counts["linear_logp"]["fallbacks"] == {ON_HOST: 1}
    # Rewards are on the host, where the reference is the intended implementation.
    assert counts["masked_sum"]["fallbacks"] == {} and counts["masked_sum"]["tokens"] == 8


def test_a_refused_call_is_not_counted():
    with using("strict"), pytest.raises(Refused, match=ON_HOST):
        call(4)
    with pytest.raises(ValueError):
        call(4, temperature=0.0)
    assert telemetry() == {}


def test_timing_is_off_by_default():
    with timed("logp", HOST):
        time.sleep(0.002)
    call(4)
    assert telemetry()["logp"]["ms"] == 0.0


def test_milliseconds_on_the_host():
    set_timing(True)
    for _ in range(2):
        with timed("logp", HOST):
            time.sleep(0.003)
    ms = telemetry()["logp"]["ms"]
    assert 6 <= ms < 500
    call(4)
    assert telemetry()["logp"]["ms"] > ms
    set_timing(False)
    after = telemetry()["logp"]["ms"]
    call(4)
    assert telemetry()["logp"]["ms"] == after


def test_milliseconds_on_a_device(monkeypatch):
    """A span has two events, which are read on request. A stand-in counts time as the device would."""
    waited = []

    class Event:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.clock += 1.5
            self.at = Event.clock

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    set_timing(True)
    for _ in range(3):
        with timed("logp", torch.device("cuda")):
            pass
    assert waited == []
    assert telemetry()["logp"]["ms"] == pytest.approx(4.5) and len(waited) == 3
    assert telemetry()["logp"]["ms"] == pytest.approx(4.5) and len(waited) == 3
