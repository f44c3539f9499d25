"""Tests the numbers that slime's plug-ins compute: ages, cache refreshes, centred scores and TensorBoard files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.hooks import SingletonMeta
from slime.observability.tensorboard_utils import _TensorboardAdapter
from slime.types import Sample
from slime.utils.score_centering import (
    get_score_centering_is_config,
    score_centering_correction,
    score_centering_request,
    validate_score_centering_args,
)
from slime.utils.staleness import compute_staleness_metrics, fully_async_metrics_enabled, sample_staleness
from slime.utils.weight_sync import should_flush_cache


@pytest.mark.parametrize(
    ("versions", "age"),
    [
        ([4, 5], 1),
        ([5], 0),
        (["3"], 2),
        ([], None),
        (None, None),
        (["default"], None),
        ([6], None),
        ([-1], 6),
    ],
)
def test_the_age_of_a_sample(versions, age):
    assert sample_staleness(Sample(weight_versions=versions), 5) == age


def test_the_ages_of_samples():
    samples = [Sample(weight_versions=versions) for versions in ([5], [2, 5], [])]
    found = compute_staleness_metrics(samples, 5)
    assert found == {"staleness/unknown_count": 1, "staleness/mean": 1.5, "staleness/max": 3}
    assert compute_staleness_metrics(samples, None) == {}
    assert compute_staleness_metrics([Sample()], 5) == {"staleness/unknown_count": 1}
    assert fully_async_metrics_enabled(SimpleNamespace(max_staleness=1))
    assert fully_async_metrics_enabled(SimpleNamespace(rollout_function_path="a.fully_async_rollout.b"))
    assert not fully_async_metrics_enabled(SimpleNamespace(max_staleness=0, rollout_function_path=None))


def test_the_updates_that_drop_the_prefix_cache():
    assert [version for version in range(1, 8) if should_flush_cache(3, version)] == [1, 4, 7]
    assert [version for version in range(5, 9) if should_flush_cache(3, version, 4)] == [5, 7]
    assert [version for version in range(1, 8) if should_flush_cache(0, version)] == [1]
    assert all(should_flush_cache(1, version) for version in range(1, 8))


def test_the_gradient_of_a_centred_score_by_hand():
    p, q = torch.tensor([[0.5, 0.2]]), torch.tensor([[0.4, 0.4]])
    log_p = p.log().requires_grad_()
    term, sampler_mass, trainer_mass = score_centering_correction(log_p, q.log())
    rho = (1 - 0.8) / (1 - 0.7)
    expected = q - rho * p
    torch.testing.assert_close(term, (expected * p.log()).sum(1))
    torch.testing.assert_close(torch.autograd.grad(term.sum(), log_p)[0], expected)
    torch.testing.assert_close(torch.stack([sampler_mass, trainer_mass]), torch.tensor([[0.8], [0.7]]))
    bounded, _, _ = score_centering_correction(log_p, q.log(), mode="tis", low=0.0, high=1.0)
    weights, tail = torch.tensor([[1.0, 0.5]]), rho * min(1 / rho, 1.0)
    torch.testing.assert_close(bounded, ((weights * q - tail * p) * p.log()).sum(1))
    with pytest.raises(ValueError, match="mode must be one of none, tis, mis, got 'x'"):
        score_centering_correction(log_p, q.log(), mode="x")


def test_flags_and_requests_of_centred_scores():
    assert get_score_centering_is_config(SimpleNamespace()) == {"mode": "none"}
    args = SimpleNamespace(use_tis=True, tis_mode="mask", tis_clip=3.0, tis_clip_low=0.5)
    assert get_score_centering_is_config(args) == {"mode": "mis", "low": 0.5, "high": 3.0}
    args = SimpleNamespace(use_score_centering=True, rollout_temperature=0.7, score_centering_top_k=4)
    params = {"max_new_tokens": 3}
    assert score_centering_request(args, params) == {}
    assert params == {"max_new_tokens": 3, "temperature": 0.7, "top_p": 1.0}
    for name, value in (("temperature", 1.0), ("top_k", 5), ("repetition_penalty", 1.1)):
        with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
            score_centering_request(args, {name: value})
    assert score_centering_request(SimpleNamespace(), {"top_k": 5}) == {}
    validate_score_centering_args(args)
    with pytest.raises(ValueError, match="--score-centering-top-k must be above 0"):
        validate_score_centering_args(SimpleNamespace(use_score_centering=True, score_centering_top_k=0))
    validate_score_centering_args(SimpleNamespace())


@pytest.fixture
def no_instances():
    SingletonMeta.clear_all_instances()
    yield
    SingletonMeta.clear_all_instances()


def test_a_tensorboard_writer_of_a_plug_in(tmp_path, monkeypatch, no_instances):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    args = SimpleNamespace(use_tensorboard=True, tb_project_name="p", tb_experiment_name="e")
    writer = _TensorboardAdapter(args)
    assert _TensorboardAdapter(args) is writer
    writer.log({"loss": torch.tensor(0.5)}, step=3)
    writer.finish()
    events = accumulator.EventAccumulator("tensorboard_log/p/e").Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]


def test_a_tensorboard_writer_needs_its_flag_and_a_folder(monkeypatch, no_instances):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    with pytest.raises(ValueError, match="--use-tensorboard must be set"):
        _TensorboardAdapter(SimpleNamespace())
    with pytest.raises(ValueError, match="--tb-project-name or TENSORBOARD_DIR must be set"):
        _TensorboardAdapter(SimpleNamespace(use_tensorboard=True))
