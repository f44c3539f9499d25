"""Tests the models of a configuration, their order, and the folders of their weights and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainer_cases import make_config

from slime.checkpoints.hf_config import read_hf_config
from slime.plan.loading_estimate import loading
from slime.plan.memory_estimate import estimate
from slime.roles import CRITIC, POLICY, REFERENCE, ROLES, describe_step, get_passes, get_roles
from slime.roles.critic import resume_folders
from slime.rules.algorithm import check_critic
from slime.rules.checkpoint import check_directories

PPO = {"advantage_estimator": "ppo"}
KL = {"use_kl_loss": True}
OPD = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"}


def names(roles) -> list[str]:
    return [role.name for role in roles]


@pytest.mark.parametrize(
    ("flags", "roles", "order"),
    [
        ({}, "policy", "train policy"),
        (KL, "reference policy", "ref_log_probs (reference) -> train policy"),
        (PPO, "critic policy", "values (critic) -> train critic -> train policy"),
        (
            PPO | {"kl_coef": 0.1},
            "reference critic policy",
            "ref_log_probs (reference) -> values (critic) -> old_log_probs (policy) -> train critic -> train policy",
        ),
        (PPO | KL | {"loss_type": "sft_loss"}, "policy", "train policy"),
        (
            OPD | KL,
            "reference teacher policy",
            "ref_log_probs (reference) -> teacher_log_probs (teacher) -> old_log_probs (policy) -> train policy",
        ),
        (OPD | {"opd_type": "vllm"}, "policy", "old_log_probs (policy) -> train policy"),
        ({"advantage_estimator": "gspo"}, "policy", "old_log_probs (policy) -> train policy"),
        ({"global_batch_size": 4}, "policy", "old_log_probs (policy) -> train policy"),
    ],
)
def test_roles_and_their_order(root, flags, roles, order):
    config = make_config(root, **flags)
    assert names(get_roles(config)) == roles.split() and describe_step(config) == order
    assert all(role is POLICY or role in get_passes(config) for role in get_roles(config))


def test_records_agree_with_themselves():
    assert len({role.name for role in ROLES}) == len({role.column for role in ROLES}) == len(ROLES)
    assert names(role for role in ROLES if role.trained) == ["critic", "policy"]


def test_memory_and_loading_count_every_role(root):
    """A frozen role has only weights. The critic has all parts of the state, without the matrix of the vocabulary."""
    hf = read_hf_config(str(root / "policy"))
    plain, kl, ppo = (estimate(make_config(root, **flags), hf) for flags in ({}, KL, PPO))
    of = {item.name: item.bytes for item in plain.kept}
    assert [item.name for item in kl.kept] == [*of, "reference"]
    assert [item.name for item in ppo.kept] == [*of, "critic weights", "critic gradients", "critic optimizer"]
    more = {item.name.removeprefix("critic "): item.bytes for item in ppo.kept if "critic" in item.name}
    assert hf["tie_word_embeddings"] and all(more[name] == of[name] for name in more)
    untied = hf | {"tie_word_embeddings": False}
    big, small = (
        {item.name: item.bytes for item in estimate(make_config(root, **PPO), untied).kept}[name]
        for name in ("weights", "critic weights")
    )
    assert big - small == 4 * hf["vocab_size"] * hf["hidden_size"]
    large = root / "large"
    large.mkdir(exist_ok=True)
    (large / "config.json").write_text(json.dumps(hf | {"num_hidden_layers": 8}))
    opd = make_config(root, **OPD | {"opd_teacher_load": str(large)})
    teacher = estimate(opd, hf).kept[-1]
    wanted = next(
        item for item in estimate(opd, hf | {"num_hidden_layers": 8}).kept if item.name == "weights"
    )
    assert (teacher.name, teacher.bytes) == ("teacher", wanted.bytes) and wanted.bytes > 2 * of["weights"]
    read = {item.name: item.bytes for item in loading(opd, hf)}
    assert read["teacher read"] == wanted.bytes and read["weights read"] == of["weights"]
    assert "for the critic too" in next(loading(make_config(root, **PPO), hf)).arithmetic


def test_what_a_critic_keeps_away_is_not_in_the_peak(root):
    """With all parts offloaded, the states of two trained roles are never on the device together."""
    hf = read_hf_config(str(root / "policy"))
    e = estimate(make_config(root, **PPO), hf)
    states = sum(item.bytes for item in e.kept)
    of_critic = sum(item.bytes for item in e.kept if item.name.startswith("critic"))
    assert e.peak_with(()) == e.peak and e.peak >= states
    weights = next(item.bytes for item in e.kept if item.name == "critic weights")
    assert e.peak - e.peak_with(("gradients", "parameters", "optimizer")) == of_critic - weights


def test_where_the_critic_is(root, tmp_path):
    load, own, save = (str(tmp_path / name) for name in ("load", "own", "save"))
    new = make_config(root, **PPO, save=save)
    assert CRITIC.saves_to(new) == f"{save}/critic" and CRITIC.resumes(new) is None
    assert CRITIC.source(new) == POLICY.source(new)
    given = make_config(root, **PPO, critic_load=own, critic_save=own, load=load, save=load)
    assert CRITIC.saves_to(given) == own and resume_folders(given) == [own]
    both = make_config(root, **PPO, load=load, save=load, critic_load=own, critic_save=save)
    assert resume_folders(both) == [own, save]  # a second start of the command
    assert REFERENCE.source(new).directory == str(root / "reference")


def test_checkpoints_of_both_fit_together(root, tmp_path):
    def saved(folder: Path, *iterations: int) -> str:
        for i in iterations:
            (folder / f"iter_{i:07d}").mkdir(parents=True)
            (folder / f"iter_{i:07d}/metadata.json").touch()
        (folder / "latest_checkpointed_iteration.txt").write_text(str(max(iterations)))
        return str(folder)

    load, own = saved(tmp_path / "load", 3, 5), saved(tmp_path / "critic", 3)
    rule = f"--critic-load must hold iteration 5, from which the policy resumes, got 3 in {own}; take an iteration"
    with pytest.raises(ValueError, match=rule):
        check_directories(make_config(root, **PPO, load=load, critic_load=own))
    check_directories(make_config(root, **PPO, load=load, critic_load=own, ckpt_step=3))
    check_directories(make_config(root, **PPO, load=load))  # the policy comes from a run without a critic
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--critic-load must name a directory, got the file"):
        check_directories(make_config(root, **PPO, critic_load=str(tmp_path / "file")))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text((root / "policy/config.json").read_text())
    with pytest.raises(ValueError, match="--critic-load must hold model.safetensors or"):
        check_directories(make_config(root, **PPO, critic_load=str(tmp_path / "hf")))


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ({"critic_load": "x"}, "--critic-load must be left out with --advantage-estimator grpo, got x"),
        (
            {"num_critic_only_steps": 2},
            "--num-critic-only-steps must be left out with --advantage-estimator grpo",
        ),
        ({"critic_lr": 0.1}, "--critic-lr must be left out with --advantage-estimator grpo, got 0.1"),
        (
            {"lambd": 0.9, "advantage_estimator": "gspo"},
            "--lambd must be left out with --advantage-estimator gspo",
        ),
        (
            PPO | {"disable_compute_advantages_and_returns": True},
            "--disable-compute-advantages-and-returns must be left out with --advantage-estimator ppo",
        ),
    ],
)
def test_a_critic_is_for_an_estimator_that_reads_values(root, flags, rule):
    with pytest.raises(ValueError, match=rule):
        check_critic(make_config(root, **flags))


def test_defaults_of_a_critic_pass(root):
    for flags in ({}, PPO, {"critic_lr": 0.5}, {"lr": 0.1}):  # 0.5 is --lr
        check_critic(make_config(root, **flags))
    assert make_config(root, **PPO).critic.critic_lr == 0.5
