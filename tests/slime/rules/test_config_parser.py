"""Tests the parser, from the words of a command line to typed values with one owner."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config import Config, core_table
from slime.config.config_file import split_argv
from slime.config.schema import SECTION_OF, SECTIONS
from slime.rules import parse_args, parser, resolve
from vime.backends import BACKENDS


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def test_every_spelling_of_a_value(argv):
    c = parse_args([*argv, "--lr=1e-4", "--rollout-stop", "a b", "c", "--rollout-stop-token-ids", "7", "9"])
    assert (
        c.megatron.lr == 1e-4
        and c.rollout.rollout_stop == ["a b", "c"]
        and c.rollout.rollout_stop_token_ids == [7, 9]
    )
    c = parse_args(
        [*argv, "--eval-prompt-data", "x", argv[3], "--apply-chat-template-kwargs", '{"think": false}']
    )
    assert c.evaluation.eval_prompt_data == ["x", argv[3]] and c.data.apply_chat_template_kwargs == {
        "think": False
    }
    c = parse_args([*argv, "--rollout_seed", "5", "--rollout-top-k", "-1"])
    assert c.rollout.rollout_seed == 5 and c.rollout.rollout_top_k == -1


def test_booleans(argv):
    assert parse_args([*argv, "--rollout-shuffle"]).rollout.rollout_shuffle is True
    assert parse_args([*argv, "--rollout-shuffle=false"]).rollout.rollout_shuffle is False
    assert parse_args([*argv, "--rollout-shuffle", "--no-rollout-shuffle"]).rollout.rollout_shuffle is False
    assert parse_args(argv).megatron.use_distributed_optimizer is True
    assert parse_args([*argv, "--no-use-distributed-optimizer"]).megatron.use_distributed_optimizer is False
    assert parse_args([*argv, "--no-save-optim"]).checkpoint.no_save_optim is True


def test_the_last_of_a_repeated_flag_wins_and_append_collects(argv):
    hooks = ["--rollout-sample-hook-path", "json.dumps", "--rollout-sample-hook-path", "json.loads"]
    c = parse_args([*argv, "--lr", "1", "--lr", "2", *hooks])
    assert c.megatron.lr == 2.0 and c.rollout.rollout_sample_hook_path == ["json.dumps", "json.loads"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["--rollout-batchsize", "4"],
            "--rollout-batchsize is not a known flag; did you mean --rollout-batch-size?",
        ),
        (["--adam-beta3", "1"], "--adam-beta3 is not a known flag; did you mean --adam-beta"),
        (["--fused-rope"], "--fused-rope is not a known flag"),
        (["--rl-kernel-ops", "linear_logq"], "got linear_logq; did you mean linear_logp?"),
        (["--attention-dropuot", "0"], "did you mean --attention-dropout?"),
        (["--vllm-enforce-eager"], "--vllm-enforce-eager is not a known flag"),
        (["--lr", "abc"], "--lr must be of type float, got 'abc'"),
        (["--lr"], "--lr must be followed by one value, got 0: none"),
        (["--num-rollout", "3", "4"], "--num-rollout must be followed by one value, got 2: 3 4"),
        (
            ["--loss-type", "sft"],
            "--loss-type must be one of policy_loss, sft_loss, dpo, reward_model, custom_loss, got sft",
        ),
        (["--colocate", "maybe"], "--colocate must stand alone or be true or false, got 'maybe'"),
        (["--train-env-vars", "A=1"], "--train-env-vars must be a JSON object, got 'A=1'"),
        (["--train-env-vars", "[1]"], "--train-env-vars must be a JSON object, got '[1]'"),
    ],
)
def test_wrong_words_are_named(argv, extra, message):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *extra])
    assert message in str(error.value)


def test_a_stray_word_is_refused():
    with pytest.raises(ValueError, match="arguments must start with a flag, got 'train'"):
        split_argv(["train", "--lr", "1"])


def test_unsupported_flags_pass_at_their_default_only(argv):
    parse_args(
        [
            *argv,
            "--update-weight-mode",
            "full",
            "--value-clip",
            "0.20",
            "--fetch-trajectory-retry-times",
            "-1",
        ]
    )
    for extra, message in [
        (["--use-opd"], "--opd-type must be given with --use-opd, got none"),
        (["--opd-teacher-load", "x"], "--use-opd must be given with --opd-teacher-load, got only x"),
        (
            ["--num-critic-only-steps", "2"],
            "--num-critic-only-steps must be left out with --advantage-estimator grpo, got 2",
        ),
    ]:
        with pytest.raises(ValueError) as error:
            parse_args([*argv, *extra])
        assert str(error.value).startswith(message)


def test_a_flag_given_again_wins_and_leaves_a_note(argv):
    given = "--lr 1e-5 --rollout-shuffle --max-tokens-per-gpu 64 --lr=1e-6 --no-rollout-shuffle --max-tokens-per-gpu 64"
    c = parse_args([*argv, *given.split()])
    assert (c.megatron.lr, c.rollout.rollout_shuffle) == (1e-6, False)
    assert [note for note in c.notes if "replaces" in note] == [
        "--lr 1e-6 replaces the earlier --lr 1e-5",
        "--no-rollout-shuffle replaces the earlier --rollout-shuffle",
    ]


def test_flags_without_effect_leave_a_note(argv):
    c = parse_args([*argv, "--log-probs-chunk-size", "1024", "--recompute-loss-function"])
    assert [n.split(" has no effect")[0] for n in c.notes] == [
        "--log-probs-chunk-size",
        "--recompute-loss-function",
    ]


def test_flags_of_slime_scripts_that_need_no_action_leave_a_note(argv):
    """These flags of router, conversion and layout ask for the present behaviour; hooks see their defaults."""
    router = "--use-slime-router --slime-router-timeout 60 --slime-router-max-connections 9"
    c = parse_args(
        [*argv, *router.split(), "--megatron-to-hf-mode", "bridge", "--qkv-format", "bshd"], BACKENDS
    )
    *notes, last = c.notes
    assert last == "--qkv-format bshd is taken as thd, which gives the same result"
    noted = dict(note.split(" has no effect: ") for note in notes)
    assert list(noted) == [word for word in router.split() if word[0] == "-"] + ["--megatron-to-hf-mode"]
    assert noted["--use-slime-router"].startswith("the engine's own router is always used")
    args = c.namespace()
    assert args.use_slime_router is False and args.qkv_format == "thd" and args.critic_lr == args.lr


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--qkv-format sbhd", "left at thd in this version, got sbhd; sequences are always packed"),
        (
            "--slime-router-middleware-paths a.B c.D",
            "left out in this version, got a.B c.D; the router runs no",
        ),
        (
            "--slime-router-health-check-failure-threshold 5",
            "left at 3 in this version, got 5; use --router-health",
        ),
        ("--critic-lr 1e-5", "left out with --advantage-estimator grpo, got 1e-05; its advantages come"),
        ("--critic-load x", "left out with --advantage-estimator grpo, got x; its advantages come"),
        ("--critic-num-nodes 2", "left out with --advantage-estimator grpo, got 2; its advantages come"),
        (
            "--critic-num-gpus-per-node 4",
            "left out with --advantage-estimator grpo, got 4; its advantages come",
        ),
        ("--critic-devices own", "left out with --advantage-estimator grpo, got own; its advantages come"),
        ("--critic-train-only", "left out with --advantage-estimator grpo, got True; its advantages come"),
    ],
)
def test_flags_of_slime_scripts_that_would_need_action_are_refused(argv, flags, rule):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()], BACKENDS)
    assert str(error.value).startswith(f"{flags.split()[0]} must be {rule}")


def test_custom_config_file_wins_over_the_command_line(argv, tmp_path):
    file = tmp_path / "more.yaml"
    file.write_text(
        "lr: 0.5\nrollout_shuffle: true\nuse-distributed-optimizer: false\nrollout_stop: [x, y]\n"
        "train_env_vars: {A: 1}\nattention_dropout: 0.0\nsave_hf: null\n"
    )
    c = parse_args(["--custom-config-path", str(file), *argv, "--lr", "1"])
    assert c.megatron.lr == 0.5 and c.rollout.rollout_shuffle and not c.megatron.use_distributed_optimizer
    assert (
        c.rollout.rollout_stop == ["x", "y"]
        and c.cluster.train_env_vars == {"A": 1}
        and c.checkpoint.save_hf is None
    )
    assert c.megatron.overrides == {"attention_dropout": 0.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_turns: 2026-01-01", "--custom-config-path must hold values that JSON can hold, got max_turns"),
        ("lr: fast", "--lr must be of type float, got 'fast'"),
        ("- lr", "--custom-config-path must hold one mapping of flag: value, got list"),
        ("a: [", "--custom-config-path must be valid YAML"),
    ],
)
def test_custom_config_file_is_checked_the_same(argv, tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        parse_args([*argv, "--custom-config-path", str(file)])
    assert str(error.value).startswith(message)
    with pytest.raises(ValueError, match=r"--custom-config-path must name a YAML file, got .*absent"):
        parse_args([*argv, "--custom-config-path", str(tmp_path / "absent")])


def test_sections_and_the_flat_namespace_of_hooks(argv):
    c = parse_args(argv)
    args = c.namespace()
    assert c.data.rollout_batch_size == c.get_value("rollout_batch_size") == args.rollout_batch_size == 4
    assert c.checkpoint.save is None and c.checkpoint.load is None
    assert args.grpo_std_normalization is True and args.rollout_global_dataset is True
    with pytest.raises(AttributeError):
        _ = c.rollout_batch_size
    with pytest.raises(AttributeError):
        c.megatron.lr = 1
    with pytest.raises(AttributeError):
        c.data.rollout_batch_size = 1


def test_a_name_belongs_to_one_section_and_hides_no_attribute():
    names = [name for cls in SECTIONS.values() for name in vars(cls())]
    assert len(names) == len(set(names)) == len(SECTION_OF)
    assert not set(names) & (set(dir(Config)) | set(SECTIONS) | {"notes"})


def test_copies_round_trip_and_defaults_are_not_shared(argv):
    c = parse_args([*argv, "--lr", "1e-3", "--train-env-vars", '{"A": "1"}', "--num-layers", "4"])
    assert Config.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    assert pickle.loads(pickle.dumps(c)) == c
    assert c.with_values(num_rollout=7).data.num_rollout == 7 and c.data.num_rollout == 3
    a, b = resolve({}), resolve({})
    a.cluster.train_env_vars["X"] = 1
    assert b.cluster.train_env_vars == {}
    with pytest.raises(ValueError, match="saved configuration must have the fields of this version"):
        Config.from_dict({**c.to_dict(), "data": {"unknown": 1}})


def test_namespace_is_a_flat_mutable_copy(argv):
    c = parse_args([*argv, "--attention-dropout", "0", "--num-layers", "4"])
    args = c.namespace(vllm_router_ip="127.0.0.1", vllm_router_port=1)
    assert (args.rollout_batch_size, args.vllm_router_port, args.attention_dropout, args.num_layers) == (
        4,
        1,
        0.0,
        4,
    )
    assert args.grpo_std_normalization is True and args.world_size == 2
    assert args.use_opd is False and args.update_weight_mode == "full"
    args.train_env_vars["X"] = 1
    args.lr = 5
    assert c.cluster.train_env_vars == {} and c.megatron.lr == 1e-6


def test_saved_file_holds_no_secret(argv, tmp_path):
    """The saved file holds no key, no key in an address, and no key for the environment of the ranks."""
    secrets = ["--wandb-key", "s3cret", "--rm-url", "http://:s3cret@judge:80", "--train-env-vars"]
    c = parse_args([*argv, *secrets, '{"HF_TOKEN": "s3cret", "N": "1"}'])
    c.save_json(tmp_path / "config.json")
    text = (tmp_path / "config.json").read_text()
    saved = Config.from_dict(json.loads(text))
    assert "s3cret" not in text and saved.logging.wandb_key == "***"
    assert saved.reward.rm_url == "http://***@judge:80"
    assert saved.cluster.train_env_vars == {"HF_TOKEN": "***", "N": "1"}
    assert c.logging.wandb_key == "s3cret" and c.reward.rm_url == "http://:s3cret@judge:80"
    assert list(tmp_path.glob("*.tmp")) == []


def test_parsing_imports_neither_megatron_nor_vllm(argv):
    code = (
        "import sys; from slime.rules import parse_args; parse_args(sys.argv[1:]); "
        "assert not {'megatron', 'vllm', 'ray', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *argv], check=True, cwd=Path(__file__).parents[3])


def test_missing_megatron_is_said(argv, monkeypatch):
    """The package is missing, and its version is not in the table."""
    monkeypatch.setattr(core_table, "core_flags", core_table.core_flags.__wrapped__)
    monkeypatch.setattr(parser, "core_flags", core_table.core_flags)
    monkeypatch.setattr("slime.bridges.megatron_versions.installed", lambda: "0.0.1")
    monkeypatch.setitem(sys.modules, "megatron.core.distributed", None)
    with pytest.raises(ValueError, match="megatron-core must be installed to check Megatron flags"):
        parse_args([*argv, "--attention-dropout", "0"])
