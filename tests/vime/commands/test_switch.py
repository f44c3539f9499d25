"""The VIME_* variables of the switch add flags to a command line, and given flags win."""

import pytest

from slime.config.config_file import split_argv
from slime.config.fields import spelled
from vime.switch import from_environment


def added(environ, *argv):
    groups, remarks = from_environment(split_argv(argv), environ)
    return {group.name: group.values for group in groups}, remarks


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({}, {}),
        ({"VIME_RL_KERNEL": ""}, {}),
        ({"VIME_RL_KERNEL": "1"}, {"rlk_fast": ["auto"]}),
        ({"VIME_RL_KERNEL": "0"}, {"rlk_fast": ["off"]}),
        ({"VIME_RLK_FAST": "strict"}, {"rlk_fast": ["strict"]}),
        ({"VIME_RL_KERNEL": "1", "VIME_RLK_FAST": "strict"}, {"rlk_fast": ["strict"]}),
        ({"VIME_RL_KERNEL": "0", "VIME_RLK_FAST": "off"}, {"rlk_fast": ["off"]}),
        (
            {"VIME_RLK_CONSISTENCY": "audit", "VIME_RL_KERNEL_OPS": "logp,ratio_kl"},
            {"rlk_consistency": ["audit"], "rl_kernel_ops": ["logp,ratio_kl"]},
        ),
    ],
)
def test_variables_become_flags(environ, flags):
    found, remarks = added(environ)
    assert found == flags
    assert [remark.partition(" is taken as ")[2] for remark in remarks] == [
        f"{spelled(name)} {value}" for name, (value,) in flags.items()
    ]


@pytest.mark.parametrize("flag", ["--rlk-fast", "--enable-rl-kernel", "--rl-kernel-strict"])
def test_a_flag_wins(flag):
    found, remarks = added({"VIME_RL_KERNEL": "0", "VIME_RL_KERNEL_OPS": "logp"}, flag, "auto")
    assert found == {"rl_kernel_ops": ["logp"]}
    assert remarks[0] == f"VIME_RL_KERNEL=0 has no effect, as {flag} is given"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"VIME_RL_KERNEL": "0", "VIME_RLK_FAST": "auto"}, "VIME_RLK_FAST must agree with VIME_RL_KERNEL, got auto"),
        ({"VIME_RL_KERNEL": "1", "VIME_RLK_FAST": "off"}, "VIME_RLK_FAST must agree with VIME_RL_KERNEL, got off"),
        ({"VIME_RL_KERNEL": "fast"}, "VIME_RL_KERNEL must be 0 or 1, got 'fast'; VIME_RLK_FAST takes"),
    ],
)  # fmt: skip
def test_contradictions(environ, message):
    with pytest.raises(ValueError, match=message):
        added(environ)


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("off", {"rlk_fast": ["off"]}),
        ("auto", {"rlk_fast": ["auto"]}),
        ("audit", {"rlk_fast": ["strict"], "rlk_consistency": ["audit"]}),
        ("strict", {"rlk_fast": ["strict"]}),
    ],
)
def test_the_mode_of_upstreams_launcher(mode, flags):
    found, remarks = added({"RL_KERNEL_MODE": mode})
    assert found == flags
    same = " ".join(f"{spelled(name)} {value}" for name, (value,) in flags.items())
    assert remarks == [f"RL_KERNEL_MODE={mode} is taken as {same}"]


@pytest.mark.parametrize(
    ("environ", "argv", "flags"),
    [
        ({"RL_KERNEL_MODE": "strict"}, ("--rlk-fast", "strict"), {}),
        ({"RL_KERNEL_MODE": "strict"}, ("--rl-kernel-strict",), {}),
        ({"RL_KERNEL_MODE": "auto"}, ("--enable-rl-kernel",), {}),
        ({"RL_KERNEL_MODE": "audit"}, ("--rlk-fast", "strict"), {"rlk_consistency": ["audit"]}),
        ({"RL_KERNEL_MODE": "off", "VIME_RL_KERNEL": "0"}, (), {"rlk_fast": ["off"]}),
        ({"RL_KERNEL_MODE": ""}, (), {}),
        ({"RL_KERNEL_ALIGNED": "0"}, (), {}),
        ({"RL_KERNEL_ALIGNED": "1"}, (), {"rlk_bitwise": [], "rlk_consistency": ["strict"]}),
        ({"RL_KERNEL_ALIGNED": "1"}, ("--rlk-consistency", "strict"), {"rlk_bitwise": []}),
        ({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "0"}, (), {}),
        ({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}, (), {"round_weights": []}),
        ({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}, ("--round-weights",), {}),
    ],
)
def test_upstreams_variables_beside_others_that_agree(environ, argv, flags):
    found, remarks = added(environ, *argv)
    assert found == flags
    assert bool(remarks) is any(environ.values())


@pytest.mark.parametrize(
    ("environ", "argv", "message"),
    [
        ({"RL_KERNEL_MODE": "off"}, ("--rlk-fast", "auto"), "RL_KERNEL_MODE=off must agree with --rlk-fast, got auto"),
        ({"RL_KERNEL_MODE": "off"}, ("--enable-rl-kernel",), "agree with --enable-rl-kernel, got auto and not off"),
        ({"RL_KERNEL_MODE": "auto"}, ("--rl-kernel-strict",), "agree with --rl-kernel-strict, got strict and not auto"),
        ({"RL_KERNEL_MODE": "audit"}, ("--rlk-consistency", "off"), "agree with --rlk-consistency, got off"),
        ({"RL_KERNEL_MODE": "strict", "VIME_RLK_FAST": "auto"}, (), "agree with VIME_RLK_FAST, got auto and"),
        ({"RL_KERNEL_MODE": "fast"}, (), "RL_KERNEL_MODE must be one of off, auto, audit, strict, got 'fast'"),
        ({"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "on"}, (), "INT4_FAKE_QAT_FLAG must be one of 0, 1, got 'on'"),
        ({"RL_KERNEL_ALIGNED": "yes"}, (), "RL_KERNEL_ALIGNED must be one of 0, 1, got 'yes'"),
        ({"RL_KERNEL_ALIGNED": "1"}, ("--rlk-consistency", "off"), "RL_KERNEL_ALIGNED=1 must agree with --rlk-cons"),
    ],
)  # fmt: skip
def test_upstreams_variables_that_contradict(environ, argv, message):
    with pytest.raises(ValueError, match=message):
        added(environ, *argv)
