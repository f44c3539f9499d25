"""Tests the audit of steps on a real trainer: figures by hand, samples that are not comparable, strict mode, faults."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from audit_cases import moved, truthful_samples, with_facts
from trainer_cases import exported, make_config

from rl_kernel.contract import TRAIN_ROLLOUT
from slime.megatron_backend.step.trainer import MegatronTrainer
from slime.rollout.debug_data import load_with_facts
from slime.rollout.facts import COLUMN, SAMPLING_KEY, run_facts
from slime.rules.kernels import check_kernels


@pytest.fixture(scope="module")
def truthful(root):
    return truthful_samples(root)


@pytest.fixture
def samples(truthful):
    return copy.deepcopy(truthful)


@pytest.fixture
def build(root, tmp_path):
    made: list[MegatronTrainer] = []

    def build_one(mode: str = "audit", **flags: Any) -> MegatronTrainer:
        paths = {"weight_dir": str(tmp_path / "weights"), "run_dir": str(tmp_path / "run")}
        config = make_config(root, rlk_consistency=mode, **paths, **flags)
        made.append(MegatronTrainer(config, 0, 1, init_method=f"file://{tmp_path}/store"))
        return made[-1]

    yield build_one
    for trainer in made:
        trainer.close()


def audited(trainer, samples, rollout_id: int = 0, facts=None) -> dict[str, float]:
    result = trainer.train(rollout_id, with_facts(trainer.config, samples, facts=facts))
    prefix = "consistency/"
    return {name.removeprefix(prefix): v for name, v in result.rollout.items() if name.startswith(prefix)}


def lines(tmp_path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]


PATHS = {
    "one_step": {},
    "extra_pass": {"global_batch_size": 4},
    "native": {"rlk_fast": "off"},
    "rollout_logprobs": {"use_rollout_logprobs": True},
    "gspo": {"advantage_estimator": "gspo"},
}


@pytest.mark.parametrize("path", PATHS)
def test_figures_are_those_of_the_known_differences(build, samples, tmp_path, path):
    differences = moved(samples)
    d = torch.tensor(differences, dtype=torch.float64)
    trainer = build(**PATHS[path])
    found = audited(trainer, samples)
    n, size = len(differences), d.abs().sort()[0]
    assert n > 30
    assert found.pop("tokens") == n and found.pop("not_comparable_tokens") == 0
    assert found.pop("bitwise_equal_tokens") == 0
    wanted = {
        "dlogp_mean": d.mean(),
        "abs_dlogp_mean": d.abs().mean(),
        "abs_dlogp_p50": size[math.ceil(0.5 * n) - 1],
        "abs_dlogp_p90": size[math.ceil(0.9 * n) - 1],
        "abs_dlogp_p99": size[math.ceil(0.99 * n) - 1],
        "abs_dlogp_max": size[-1],
        "ratio_mean": d.exp().mean(),
        "clip_fraction": ((d.exp() < 0.8) | (d.exp() > 1.28)).double().mean(),
        "k3": (d.exp() - 1 - d).mean(),
    }
    assert 0 < wanted["clip_fraction"] < 0.3
    assert found == pytest.approx({name: value.item() for name, value in wanted.items()}, abs=2e-6)
    (line,) = lines(tmp_path)
    worst = line["worst"]
    sample = next(s for s in samples if s.index == worst["sample"])
    assert worst["rollout"] == pytest.approx(sample.rollout_log_probs[worst["position"]], abs=1e-6)
    assert worst["token_id"] == sample.tokens[-sample.response_length + worst["position"]]
    assert worst["trainer"] - worst["rollout"] == pytest.approx(d[d.abs().argmax()].item(), abs=2e-6)
    assert line["rollout_id"] == 0 and line["tokens"] == n and line["abs_dlogp_max"] == found["abs_dlogp_max"]


def test_the_audit_changes_no_weight_and_its_time_is_told(build, samples, root, tmp_path):
    moved(samples)
    trainer = build()
    result = trainer.train(0, with_facts(trainer.config, samples))
    assert 0 < result.perf["perf/consistency_time"] < result.perf["perf/trainer_time"]
    weights = exported(trainer)
    trainer.close()
    off = MegatronTrainer(
        make_config(root, weight_dir=str(tmp_path)), 0, 1, init_method=f"file://{tmp_path}/2"
    )
    plain = off.train(0, with_facts(off.config, samples))
    assert "perf/consistency_time" not in plain.perf
    assert not [name for name in plain.rollout if name.startswith("consistency")]
    for name, tensor in exported(off).items():
        assert torch.equal(tensor, weights[name]), name
    off.close()


def test_equal_log_probs_within_the_tolerance_pass_strict(build, samples):
    found = audited(build("strict"), samples)
    assert found["abs_dlogp_max"] < 5e-6 < TRAIN_ROLLOUT["float32"].absolute
    assert found["clip_fraction"] == 0 and found["k3"] < 1e-10


def test_bitwise_equal_tokens_are_counted(build, samples):
    """The rollout's log-probs are the trainer's own, but one is off by one unit in the last place."""
    trainer = build(rlk_fast="off", lr=0.0)
    data = with_facts(trainer.config, samples)
    trainer.train(0, data)
    data = with_facts(trainer.config, samples)
    with trainer.trainings[-1].audit.watch(0, data, {}):
        data.to_device(trainer.info.device, per_token=False)
        trainer.add_advantages(data)
        trainer.trainings[-1].optimizer_steps(0, data)
        mine = dict(trainer.trainings[-1].audit.found)
    for i, values in mine.items():
        data["rollout_log_probs"][i] = values.clone()
    i = data["sample_indices"].index(0)
    data["rollout_log_probs"][i][0] = torch.nextafter(mine[i][0], torch.tensor(0.0))
    result = trainer.train(0, data)
    tokens = result.rollout["consistency/tokens"]
    assert result.rollout["consistency/bitwise_equal_tokens"] == tokens - 1


def active(samples, indices) -> int:
    return sum(sum(s.loss_mask) for s in samples if s.index in indices and not s.remove_sample)


def stale(samples):
    samples[0].weight_versions = [1]
    samples[1].weight_versions = [0, 1]
    samples[2].weight_versions = []
    return "weight_version", (0, 1, 2)


def other_temperature(samples):
    samples[3].metadata[SAMPLING_KEY] = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "sampling": {}}
    return "temperature", (3,)


def other_top_k(samples):
    samples[3].metadata[SAMPLING_KEY] = {"temperature": 1.0, "top_p": 1.0, "top_k": 5, "sampling": {}}
    return "top_k", (3,)


def penalised(samples):
    mine = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "sampling": {"repetition_penalty": 1.2}}
    samples[3].metadata[SAMPLING_KEY] = mine
    return "sampling", (3,)


@pytest.mark.parametrize("change", [stale, other_temperature, other_top_k, penalised])
def test_samples_that_differ_are_counted_and_left_out(build, samples, tmp_path, change):
    reason, indices = change(samples)
    for s in samples:
        if s.index in indices:
            s.rollout_log_probs = [lp - 3.0 for lp in s.rollout_log_probs]
    found = audited(build(), samples)
    left_out = active(samples, indices)
    assert left_out > 0
    assert found["not_comparable_tokens"] == found[f"not_comparable/{reason}"] == left_out
    assert found["tokens"] == active(samples, range(9)) - left_out
    assert found["abs_dlogp_max"] < 1e-4, "three nats of the others would be seen"
    assert lines(tmp_path)[0]["not_comparable"] == {reason: left_out}


RUN_WIDE = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "dtype": {"dtype": "bfloat16"},
    "tokenizer": {"tokenizer": "0123456789abcdef"},
}


@pytest.mark.parametrize("reason", RUN_WIDE)
def test_a_rollout_drawn_otherwise_is_not_compared_at_all(build, samples, reason):
    trainer = build()
    facts = run_facts(trainer.config) | RUN_WIDE[reason]
    found = audited(trainer, samples, facts=facts)
    tokens = active(samples, range(9))
    assert found == {
        "tokens": 0,
        "not_comparable_tokens": tokens,
        f"not_comparable/{reason}": tokens,
    }


def test_weights_of_a_later_version_are_compared_with_later_rollouts(build, samples):
    for s in samples:
        s.weight_versions = [3]
    trainer = build()
    assert audited(trainer, samples, rollout_id=3)["tokens"] == active(samples, range(9))
    assert audited(trainer, samples, rollout_id=4)["not_comparable/weight_version"] == active(
        samples, range(9)
    )


def test_tokens_and_masks_changed_on_the_way_are_noticed(build, samples):
    trainer = build()
    data = with_facts(trainer.config, samples)
    i, j = data["sample_indices"].index(0), data["sample_indices"].index(1)
    data["tokens"][i][-1] = (data["tokens"][i][-1] + 1) % 99
    data["loss_masks"][j][-1] = 1 - data["loss_masks"][j][-1]
    found = trainer.train(0, data).rollout
    assert found["consistency/not_comparable/token_ids"] == sum(samples[0].loss_mask)
    assert found["consistency/not_comparable/mask"] == data["loss_masks"][j].sum()


def test_samples_without_a_record_are_not_compared(build, samples):
    trainer = build()
    data = with_facts(trainer.config, samples)
    del data[COLUMN]
    found = trainer.train(0, data).rollout
    assert found["consistency/not_comparable/unrecorded"] == active(samples, range(9))


def test_samples_first_seen_after_an_update_are_not_compared(build, samples):
    """With --use-rollout-logprobs no pass precedes the two steps, and the second step has new weights."""
    found = audited(build(use_rollout_logprobs=True, global_batch_size=4), samples)
    second = {s.index for s in samples if s.index >= 4}
    assert found["not_comparable/later_step"] == active(samples, second)
    assert found["tokens"] == active(samples, range(4)) and found["abs_dlogp_max"] < 1e-4


def test_strict_stops_at_the_worst_token_and_keeps_the_batch(build, samples, tmp_path):
    samples[2].loss_mask[1] = 1
    samples[2].rollout_log_probs[1] += 0.01
    samples[5].rollout_log_probs[0] += 0.005
    trainer = build("strict", global_batch_size=4)
    before = exported(trainer)
    with pytest.raises(RuntimeError, match=r"got 0\.01 at position 1 of sample 2 ") as error:
        audited(trainer, samples)
    assert "0.000244 nats (float32)" in str(error.value) and "in rollout 0" in str(error.value)
    for name, tensor in exported(trainer).items():
        assert torch.equal(tensor, before[name]), "with the extra pass it stops before the first update"
    path = str(tmp_path / "run" / "audit" / "{rollout_id}.pt")
    assert path.format(rollout_id=0) in str(error.value)
    groups, facts = load_with_facts(path, 0)
    saved = {s.index: s for group in groups for s in group if s.index not in (7, 8)}
    assert [len(group) for group in groups] == [2, 2, 2, 3]
    for s in samples[:7]:
        assert saved[s.index].tokens == s.tokens and saved[s.index].group_index == s.group_index
        assert saved[s.index].rollout_log_probs == pytest.approx(s.rollout_log_probs, abs=1e-6)
        assert saved[s.index].remove_sample == s.remove_sample
        assert saved[s.index].reward == s.reward and saved[s.index].weight_versions == [0]
    again = with_facts(trainer.config, [s for group in groups for s in group], facts=facts)
    with pytest.raises(RuntimeError, match=r"got 0\.01 at position 1 of sample 2 "):
        trainer.train(0, again)


def test_strict_does_not_pass_when_nothing_can_be_compared(build, samples):
    with pytest.raises(
        RuntimeError, match=r"must have tokens to compare, got none in rollout 1 \(weight_version: "
    ):
        audited(build("strict"), samples, rollout_id=1)


def test_a_rollout_without_log_probs_is_refused(build, samples):
    trainer = build()
    data = with_facts(trainer.config, samples)
    del data["rollout_log_probs"]
    with pytest.raises(ValueError, match="must be given rollouts with log-probs, got none in rollout 0"):
        trainer.train(0, data)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_is_named_and_the_batch_saved(build, samples, tmp_path, value):
    """A conversion hook could leave such a value. The weights must not have moved."""
    trainer = build(use_tis=True)
    before = exported(trainer)
    data = with_facts(trainer.config, samples)
    i = data["sample_indices"].index(6)
    data["rollout_log_probs"][i][0] = value
    with pytest.raises(
        ValueError, match=rf"must be finite, got position 0 of sample 6 .*rollout {value}"
    ) as error:
        trainer.train(0, data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in exported(trainer).items())
    groups, _ = load_with_facts(str(tmp_path / "run" / "audit" / "{rollout_id}.pt"), 0)
    assert "audit/0.pt" in str(error.value)
    (saved,) = [s for group in groups for s in group if s.index == 6]
    assert not math.isfinite(saved.rollout_log_probs[0]) and math.isfinite(saved.rollout_log_probs[1])


def test_masked_tokens_may_hold_anything(build, samples):
    trainer = build()
    data = with_facts(trainer.config, samples)
    i = data["sample_indices"].index(4)  # it is removed, so it has no active token
    data["rollout_log_probs"][i][:] = float("nan")
    assert trainer.train(0, data).rollout["consistency/tokens"] == active(samples, range(9))


@pytest.mark.parametrize("flags", [{}, {"global_batch_size": 4}])
def test_a_trainer_whose_log_probs_are_not_finite_says_so(build, samples, flags):
    trainer = build(**flags)
    with torch.no_grad():
        next(iter(trainer.policy.model.parameters())).fill_(float("nan"))
    with pytest.raises(
        ValueError, match=r"must be finite, got position 0 of sample \d .*trainer nan, rollout -"
    ):
        trainer.train(0, with_facts(trainer.config, samples))


def test_flags_that_leave_nothing_to_compare_are_refused(root):
    with pytest.raises(
        ValueError, match="--rlk-consistency must be off with --loss-type sft_loss, got audit"
    ):
        check_kernels(make_config(root, rlk_consistency="audit", loss_type="sft_loss"))
    with pytest.raises(ValueError, match="must be off with --debug-rollout-only, got strict"):
        check_kernels(make_config(root, rlk_consistency="strict", debug_rollout_only=True))
    check_kernels(make_config(root, rlk_consistency="strict"))
