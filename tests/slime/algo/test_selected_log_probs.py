"""Tests the interface of upstream vime's providers: the records, the fallback in both modes, and the checks of a
result."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch

from slime.algo.selected_log_probs import (
    ContextParallelLayout,
    SelectedLogprobProvider,
    SelectedLogprobProviderUnavailable,
    SelectedLogprobRequest,
    SelectedLogprobResult,
    compute_selected_logprobs,
)

T, V, H = 3, 5, 4
ANSWER: dict[str, object] = {}
"""The result or the error of `provider`, set by a test."""


def request(**changes) -> SelectedLogprobRequest:
    fields = {
        "logits": torch.randn(T, V, requires_grad=True),
        "target_ids": torch.tensor([1, 2, 3]),
        "tensor_parallel_group": None,
        "context_parallel": ContextParallelLayout(2, 1, "zigzag"),
        "with_entropy": False,
        "with_entropy_grad": False,
        "chunk_size": 64,
    }
    return SelectedLogprobRequest(**fields | changes)


def layer(**changes) -> dict:
    fields = {"hidden": torch.randn(T, H), "lm_head_weight": torch.randn(V, H)}
    return fields | {"temperature": torch.ones(T), "global_vocab_size": V, "real_vocab_size": V - 1} | changes


def provider(asked):
    ANSWER["request"] = asked
    if "error" in ANSWER:
        raise ANSWER["error"]
    result = {
        "selected_logprobs": asked.logits[:, :1],
        "entropy": asked.logits.sum(-1) if asked.with_entropy else None,
        "backend_id": "test",
        "contract_id": "test/1",
        "provenance": {"reduced": "by the provider"},
    }
    result |= ANSWER.get("changes", {})
    return (
        {k: v for k, v in result.items() if v != "left out"}
        if ANSWER.get("as") == "mapping"
        else namespace(result)
    )


def namespace(result):
    return SimpleNamespace(
        **{name: value for name, value in result.items() if not isinstance(value, str) or value != "left out"}
    )


def native(
    logits,
    target_ids,
    tensor_parallel_group,
    *,
    with_entropy,
    with_entropy_grad,
    chunk_size,
    log_prob_keep_mask,
):
    ANSWER["native"] = ANSWER.get("native", 0) + 1
    assert (chunk_size, log_prob_keep_mask, tensor_parallel_group) == (64, None, None)
    assert with_entropy_grad is with_entropy
    return logits[:, 1:2], logits.mean(-1) if with_entropy else None


@pytest.fixture(autouse=True)
def no_answer():
    ANSWER.clear()


def ask(mode="auto", path=f"{__name__}.provider", **changes):
    args = SimpleNamespace(selected_logprob_provider=path, selected_logprob_provider_mode=mode)
    asked = request(**changes)
    return asked, compute_selected_logprobs(args=args, request=asked, native=native)


def test_the_paths_of_upstream_are_one_module():
    """`vime.backends` is a module of this project, and the modules below it are slime's."""
    importlib.import_module("vime")
    modules = [
        importlib.import_module(f"{root}.backends.megatron_utils.selected_logprob_provider")
        for root in ("vime", "slime")
    ]
    assert modules[0] is modules[1] and modules[0].SelectedLogprobRequest is SelectedLogprobRequest
    assert isinstance(provider, SelectedLogprobProvider)


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize("form", ["mapping", "object"])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_result_is_taken(mode, form, entropy, caplog):
    ANSWER["as"] = form
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            asked, (log_probs, values) = ask(mode, with_entropy=entropy, with_entropy_grad=entropy)
    assert ANSWER["request"] is asked and torch.equal(log_probs, asked.logits[:, :1])
    assert (values is None) is not entropy
    assert len(caplog.messages) == 1 and "backend_id=test contract_id=test/1" in caplog.messages[0]


@pytest.mark.parametrize("args", [SimpleNamespace(), SimpleNamespace(selected_logprob_provider=None)])
def test_without_a_provider_the_trainer_computes(args):
    log_probs, entropy = compute_selected_logprobs(args=args, request=(asked := request()), native=native)
    assert entropy is None and torch.equal(log_probs, asked.logits[:, 1:2])


class OfThePackage(Exception):
    selected_logprob_provider_unavailable = True


UNAVAILABLE = {
    "no module": {"path": "no_such_package.module.provider"},
    "no name": {"path": f"{__name__}.provide"},
    "its error": {"error": SelectedLogprobProviderUnavailable("this layout")},
    "an error with the attribute": {"error": OfThePackage("this card")},
}


@pytest.mark.parametrize("case", UNAVAILABLE)
def test_unavailable_falls_back_in_auto_and_ends_in_strict(case, caplog):
    path = UNAVAILABLE[case].get("path", f"{__name__}.provider")
    ANSWER.update({k: v for k, v in UNAVAILABLE[case].items() if k == "error"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            asked, (log_probs, values) = ask("auto", path, with_entropy=True, with_entropy_grad=True)
    assert torch.equal(log_probs, asked.logits[:, 1:2]) and torch.equal(values, asked.logits.mean(-1))
    assert ANSWER["native"] == 2 and len(caplog.messages) == 1, "one line for one reason"
    assert f"{path} is unavailable, the trainer's own log-probs are used" in caplog.messages[0]
    with pytest.raises(RuntimeError, match="must be available in mode strict, but it is unavailable"):
        ask("strict", path)
    assert ANSWER["native"] == 2


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize("error", [AttributeError("a bug"), ImportError("inside a call"), KeyError("x")])
def test_other_errors_end_the_run_in_both_modes(mode, error):
    ANSWER["error"] = error
    with pytest.raises(type(error)):
        ask(mode)
    assert "native" not in ANSWER


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selected_logprobs": torch.zeros(T)}, r"return selected_logprobs of shape \[3, 1\], got \[3\]"),
        ({"selected_logprobs": torch.zeros(T, 1, dtype=torch.int64)}, "selected_logprobs in floating point"),
        ({"selected_logprobs": torch.zeros(T, 1, device="meta")}, "selected_logprobs on cpu, got meta"),
        ({"selected_logprobs": [0.0] * T}, "return selected_logprobs as a tensor, got list"),
        ({"entropy": torch.zeros(T)}, "return no entropy where with_entropy is false"),
        ({"provenance": None}, "return a mapping as provenance, got NoneType"),
        ({"contract_id": "left out"}, "got SimpleNamespace without contract_id"),
    ],
)
def test_a_malformed_result_ends_the_run(mode, changes, message):
    ANSWER["changes"] = changes
    with pytest.raises(ValueError, match=message):
        ask(mode)
    assert "native" not in ANSWER


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize(
    ("entropy", "message"),
    [
        (None, "return entropy as a tensor, got NoneType"),
        (torch.zeros(T, 1), r"return entropy of shape \[3\], got \[3, 1\]"),
        (torch.zeros(T, dtype=torch.int32), "return entropy in floating point"),
        (torch.zeros(T, device="meta"), "return entropy on cpu, got meta"),
    ],
)
def test_an_entropy_that_was_asked_for(mode, entropy, message):
    ANSWER["changes"] = {"entropy": entropy}
    with pytest.raises(ValueError, match=message):
        ask(mode, with_entropy=True, with_entropy_grad=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend_id": ""}, "return a backend_id and a contract_id in mode strict"),
        ({"contract_id": None}, "return a backend_id and a contract_id in mode strict"),
        (
            {"selected_logprobs": torch.zeros(T, 1)},
            "selected_logprobs that autograd can follow.*got a detached",
        ),
        ({"entropy": torch.zeros(T)}, "entropy that autograd can follow.*got a detached"),
    ],
)
def test_what_strict_alone_asks_for(changes, message):
    ANSWER["changes"] = changes
    ask("auto", with_entropy=True, with_entropy_grad=True)
    with pytest.raises(ValueError, match=message):
        ask("strict", with_entropy=True, with_entropy_grad=True)


def test_strict_takes_a_detached_result_where_nothing_needs_a_gradient():
    ANSWER["changes"] = {"selected_logprobs": torch.zeros(T, 1), "entropy": torch.zeros(T)}
    with torch.no_grad():
        ask("strict", logits=torch.randn(T, V), with_entropy=True)
    ANSWER["changes"] = {"entropy": torch.zeros(T)}
    ask("strict", with_entropy=True)  # the entropy is a metric


@pytest.mark.parametrize("path", ["provider", "a..b", f"{__name__}.T"])
def test_what_can_never_be_a_provider_ends_the_run_in_auto(path):
    with pytest.raises(ValueError, match="--selected-logprob-provider must"):
        ask("auto", path)


def test_an_unknown_mode_is_an_error():
    with pytest.raises(
        ValueError, match="--selected-logprob-provider-mode must be one of auto, strict, got 'fast'"
    ):
        ask("fast")


def test_a_request_with_the_layer():
    asked = request(**layer(lm_head_bias=torch.randn(V)))
    assert asked.hidden.shape == (T, H) and asked.vocab_start_index == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(V)}, r"logits must be \[T, V_local\], got \[5\]"),
        ({"target_ids": torch.zeros(2, dtype=torch.int64)}, r"target_ids must have shape \[3\], got \[2\]"),
        ({"target_ids": torch.zeros(T)}, "target_ids must be integers, got torch.float32"),
        ({"target_ids": torch.zeros(T, dtype=torch.int64, device="meta")}, "target_ids must be on cpu"),
        (
            {"log_prob_keep_mask": torch.ones(T, 4)},
            r"log_prob_keep_mask must have shape \[3, 5\], got \[3, 4\]",
        ),
        (layer(lm_head_weight=None), "lm_head_weight must be a matrix as the other one is, got none"),
        ({"lm_head_bias": torch.zeros(V)}, "hidden must be a matrix as the other one is, got none"),
        (layer(hidden=torch.zeros(2, H)), "hidden rows must be the 3 of logits, got 2"),
        (layer(lm_head_weight=torch.zeros(V, 6)), "hidden width must be that of lm_head_weight, got 4 and 6"),
        (layer(lm_head_weight=torch.zeros(7, H)), r"lm_head_weight must have shape \[5, 4\], got \[7, 4\]"),
        (layer(hidden=torch.zeros(T, H, device="meta")), "hidden must be on cpu, where logits are, got meta"),
        (layer(lm_head_bias=torch.zeros(2)), r"lm_head_bias must have shape \[5\], got \[2\]"),
        (layer(real_vocab_size=0), "real_vocab_size must be a number >= 1, got 0"),
        (layer(global_vocab_size=True), "global_vocab_size must be a number >= 1, got True"),
        (layer(temperature=0.0), "temperature must be positive, got 0.0"),
        (layer(temperature=torch.tensor([1.0, 0.0, 1.0])), "temperature must be positive, got tensor"),
        (layer(temperature=torch.ones(2)), r"temperature must have 1 or 3 values, got \[2\]"),
    ],
)
def test_a_bad_request_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        request(**changes)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((0, 0, "single"), r"rank must lie in \[0, world_size\), got rank 0 of 0"),
        ((2, 2, "zigzag"), r"rank must lie in \[0, world_size\), got rank 2 of 2"),
        ((1, 0, "zigzag"), "layout must be single exactly for one rank, got zigzag for 1 ranks"),
        ((2, 0, "single"), "layout must be single exactly for one rank, got single for 2 ranks"),
        ((2, 0, "ring"), "layout must be one of single, zigzag, allgather, got 'ring'"),
    ],
)
def test_a_bad_layout_is_an_error(layout, message):
    with pytest.raises(ValueError, match=message):
        ContextParallelLayout(*layout)


def test_the_result_has_upstreams_names():
    result = SelectedLogprobResult(torch.zeros(T, 1), None, "a", "b")
    assert dict(result.provenance) == {}
