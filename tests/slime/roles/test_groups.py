"""Tests each role's ranks, and the values that the ranks send to each other."""

from __future__ import annotations

import pytest
from trainer_cases import make_config

from slime.checkpoints.hf_config import read_hf_config
from slime.operators import VALUES, loss_head
from slime.plan.loading_estimate import loading
from slime.plan.memory_decision import decide_residence
from slime.plan.memory_estimate import estimate
from slime.roles import describe_step, get_roles
from slime.roles.groups import build_groups, read_by, sent_by, trainer_ranks
from slime.rules.cluster import check_critic_devices, check_parallel_sizes, critic_notes

PPO = {"advantage_estimator": "ppo"}
OWN = PPO | {"critic_devices": "own"}


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ({}, {"trainer": 1}),
        (PPO, {"trainer": 1}),
        (
            PPO | {"critic_num_gpus_per_node": 1},
            {"trainer": 1},
        ),  # the critic has the policy's number of ranks, on slime's shared devices
        (
            PPO | {"actor_num_gpus_per_node": 4, "critic_num_nodes": 2, "critic_num_gpus_per_node": 2},
            {"trainer": 4},
        ),
        (OWN, {"trainer": 1, "critic": 1}),
        (OWN | {"actor_num_gpus_per_node": 4}, {"trainer": 4, "critic": 4}),
        (PPO | {"critic_num_gpus_per_node": 2}, {"trainer": 1, "critic": 2}),
        (PPO | {"critic_num_nodes": 3}, {"trainer": 1, "critic": 3}),
        (OWN | {"advantage_estimator": "grpo"}, {"trainer": 1}),
    ],
)
def test_ranks_of_the_groups(root, flags, ranks):
    config = make_config(root, **flags)
    groups = build_groups(config)
    assert {group.name: group.ranks for group in groups} == ranks
    assert trainer_ranks(config) == sum(ranks.values())
    assert [role for group in groups for role in get_roles(group.config)] == sorted(
        get_roles(config), key=lambda role: len(ranks) > 1 and role.name == "critic"
    )
    for group in groups:
        assert [other.ranks for other in build_groups(group.config)] == [group.ranks]


@pytest.mark.parametrize(
    ("flags", "to_trainer", "to_critic"),
    [
        ({}, "values", ""),
        ({"use_kl_loss": True}, "values", ""),
        ({"get_mismatch_metrics": True}, "values", ""),
        ({"kl_coef": 0.1}, "values", "old_log_probs ref_log_probs"),
        (
            {"use_kl_loss": True, "custom_advantage_function_path": "trainer_cases.advantage_hook"},
            "values",
            "old_log_probs ref_log_probs",
        ),
        (
            {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"},
            "values",
            "old_log_probs teacher_log_probs",
        ),
    ],
)
def test_what_groups_send_to_each_other(root, flags, to_trainer, to_critic):
    trainer, critic = build_groups(make_config(root, **OWN, **flags))
    assert " ".join(sorted(sent_by(critic.config) & read_by(trainer.config))) == to_trainer
    assert " ".join(sorted(sent_by(trainer.config) & read_by(critic.config))) == to_critic
    assert trainer.awaits(critic) and critic.awaits(trainer) == bool(to_critic)
    assert not trainer.awaits(trainer)


def test_each_group_has_the_memory_and_the_steps_of_its_roles(root):
    hf = read_hf_config(str(root / "policy"))
    flags = {"use_kl_loss": True, "colocate": True, "offload_train": True}
    both = make_config(root, **PPO, **flags)
    trainer, critic = (group.config for group in build_groups(make_config(root, **OWN, **flags)))
    names = [{item.name: item.bytes for item in estimate(c, hf).kept} for c in (both, trainer, critic)]
    assert names[0] == names[1] | names[2] and not names[1].keys() & names[2].keys()
    assert [bool(decide_residence(c, estimate(c, hf), None).leaving) for c in (trainer, critic)] == [
        True,
        False,
    ]
    assert describe_step(trainer) == "ref_log_probs (reference) -> train policy"
    assert describe_step(critic) == "values (critic) -> train critic"
    assert loss_head(critic)[0] == VALUES != loss_head(trainer)[0]
    read = [next(loading(c, hf)) for c in (both, trainer, critic)]
    assert [item.bytes / read[2].bytes for item in read] == [3, 2, 1]
    assert "too" in read[1].arithmetic and "too" not in read[2].arithmetic


def test_rules_of_the_critics_devices(root):
    more = make_config(root, **PPO, critic_devices="shared", critic_num_gpus_per_node=2)
    rule = "--critic-num-nodes . --critic-num-gpus-per-node must equal .* shared, got 1 . 2 and 1 . 1"
    with pytest.raises(ValueError, match=rule):
        check_critic_devices(more)
    tensor = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2}
    rule = "--critic-num-nodes . --critic-num-gpus-per-node must be a multiple .*, got 1 . 3 = 3 and 2 . 1 . 1 = 2"
    with pytest.raises(ValueError, match=rule):
        check_parallel_sizes(make_config(root, **PPO, **tensor, critic_num_gpus_per_node=3))
    counted = make_config(root, **PPO, critic_num_gpus_per_node=1)
    assert [note for note in counted.notes if "--critic-devices own" in note] == list(critic_notes(counted))
    for flags in (PPO, OWN, OWN | {"critic_num_gpus_per_node": 1}, PPO | {"critic_num_gpus_per_node": 2}):
        config = make_config(root, **flags)
        check_critic_devices(config), check_parallel_sizes(config)
        assert not list(critic_notes(config))
