"""The error for a setting of TRL or verl names the flags of this project."""

import re
from collections import Counter
from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config.peer_names import PEER_NAMES as OWN
from slime.config.peer_names import parse_override
from slime.config.peer_rows import OTHERS, TRL, VALUES, VERL
from slime.rules.parser import check_flags, parse_args
from vime.backends import BACKENDS
from vime.commands.flags import all_rows
from vime.vllm.peer_names import VLLM_PEER_NAMES

PEER_NAMES = OWN | VLLM_PEER_NAMES


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def problems_of(argv: list[str]) -> list[str]:
    with pytest.raises(ValueError) as error:
        check_flags(argv, BACKENDS)
    return re.split(r"\n  \d+\. |\A\d+ problems:\n", str(error.value))


def typed_as(name: str, program: str) -> list[str]:
    """Returns the spellings of a setting on a command line, with the value 1."""
    if program == VERL:
        return [f"{name}=1"]
    return [f"--{name}=1", f"--{name.replace('_', '-')}=1"]


def test_each_name_of_the_table_is_answered_in_one_table():
    """All names are in one command, with dashes for underscores too, and verl's names as Hydra spells them."""
    assert Counter(each.program for each in PEER_NAMES.values()) >= Counter({TRL: 80, VERL: 120, OTHERS: 30})
    tokens = [token for name, each in PEER_NAMES.items() for token in typed_as(name, each.program)]
    (text,) = problems_of(tokens)
    title, *lines = text.splitlines()
    assert title == (
        f"{len(tokens)} settings of other trainers must be flags of vime, got the left column; give the right one "
        "(docs/from-trl.md, docs/from-verl.md):"
    )
    answers = [each.line("1") for e in PEER_NAMES.values() for each in [e] * len(typed_as(e.name, e.program))]
    assert [line.partition(" -> ")[2] for line in lines] == answers


def test_a_peer_name_is_no_flag_of_this_project():
    """If a peer's name were a flag of this project, users could not give the flag."""
    known = {row["flag"] for row in all_rows()}
    assert not [name for name in PEER_NAMES if f"--{name.replace('_', '-')}" in known]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--no-scale-rewards", "give --disable-grpo-std-normalization"),
        ("--scale_rewards none", "give --disable-grpo-std-normalization"),
        ("--scale-rewards", "leave scale_rewards of TRL out"),
        ("--reward_weights 0.5 1", "give --rm-weights 0.5 1"),
        ("--no-gradient-checkpointing", "leave gradient_checkpointing=false out"),
        ("--vllm_server_port 8000", "give --rollout-external-engine-addrs"),
        ("--vllm-mem-fraction 0.5", "give --vllm-gpu-memory-utilization 0.5"),
        ("--vllm-context-length 9", "give --vllm-max-model-len 9"),
        ("--vllm-tp-size 2", "give --rollout-num-gpus-per-engine 2"),
        ("--n-samples 8", "for n_samples, give --n-samples-per-prompt 8"),
        ("--ref-ckpt /a", "give --ref-load /a"),
        ("--report_to none", "leave report_to=none of TRL out"),
        (
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
            "optimizer_offload=False of verl out",
        ),
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", "give --optimizer-cpu-offload"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=false", "param_offload=false of verl out"),
        ("algorithm.use_kl_in_reward=False", "leave algorithm.use_kl_in_reward=False of verl out"),
        ("trainer.val_before_train=False", "give --skip-eval-before-train"),
        ("trainer.val_before_train=True", "leave trainer.val_before_train=True of verl out"),
        ("critic.model.path=null", "leave critic.model.path=null of verl out"),
        ("trainer.logger=['console','wandb']", "give --use-wandb "),
        ("trainer.logger=[console]", "leave trainer.logger=[console] of verl out"),
        ("algorithm.adv_estimator=gae", "give --advantage-estimator ppo"),
        ("data.train_batch_size=1024", "give --rollout-batch-size 1024"),
        ("custom_reward_function.name=score", "give --custom-rm-path FILE.py:score"),
    ],
)
def test_the_value_decides(words, answer):
    (text,) = problems_of(words.split())
    assert " is not a known flag; " in text and answer in text, text
    assert answer.startswith("leave") == ("; leave " in text) or " of verl out" in answer


def test_each_switch_of_a_peer_has_both_answers():
    """A setting with an answer for true also has one for false, and the two differ."""
    for each in PEER_NAMES.values():
        if "true" in each.values:
            pair = each.ours("True"), each.ours("False")
            assert pair[0] != pair[1] or each.name == "data.filter_overlong_prompts", each


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--loss-type dr_grpo", "give --use-dr-grpo instead"),
        ("--loss-type grpo", "leave the flag out"),
        ("--loss-type bnpo", "give --calculate-per-token-loss instead"),
        ("--loss-type dapo", "give --calculate-per-token-loss instead"),
        ("--loss-type polcy_loss", "did you mean policy_loss?"),
        ("--advantage-estimator dr_grpo", "give grpo with --use-dr-grpo"),
        ("--advantage-estimator grpoo", "did you mean grpo?"),
        ("--pg-loss-type dr_grpo", "give --use-dr-grpo instead"),
        ("--kl-loss-type mse", "give k2"),
        ("--lr-decay-style cosine_with_min_lr", "give cosine with --min-lr"),
        ("--lr-decay-style cosin", "did you mean cosine?"),
        ("--optimizer adamw_torch", "give adam, "),
        ("--router-policy consistent_hashing", "did you mean consistent_hash?"),
    ],
)
def test_values_of_other_trainers(argv, words, answer):
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *words.split()], BACKENDS)
    flag, value = words.split()
    assert flag in str(error.value) and value in str(error.value) and f"; {answer}" in str(error.value)


def test_values_of_other_trainers_are_none_of_this_project(argv):
    for flag, values in VALUES.items():
        for value, answer in values.items():
            with pytest.raises(ValueError, match="--" + flag.replace("_", "-")) as error:
                parse_args([*argv, "--" + flag.replace("_", "-"), value], BACKENDS)
            assert f"got {value}; {answer}" in str(error.value), (flag, value)


def test_flags_of_values_exist():
    known = {row["flag"] for row in all_rows()}
    text = " ".join(answer for each in VALUES.values() for answer in each.values())
    assert set(re.findall(r"--[a-z][a-z0-9-]*", text)) <= known


def test_each_flag_of_the_table_exists():
    """The flags are the plan's own, Megatron's and vLLM's, including those in the notes."""
    known = {row["flag"] for row in all_rows()}
    for each in PEER_NAMES.values():
        text = " ".join([each.flags, each.note, *each.values.values()])
        wanted = re.findall(r"--[a-z][a-z0-9-]*", text)
        assert wanted or not each.flags, each
        assert set(wanted) <= known, (each.name, set(wanted) - known)
        assert each.flags or each.note, each.name


@pytest.mark.parametrize(
    ("token", "found"),
    [
        ("algorithm.gamma=1", ("algorithm.gamma", "1")),
        ("+trainer.x.y=[a,b]", ("trainer.x.y", "[a,b]")),
        ("++data.train_files=a=b", ("data.train_files", "a=b")),
        ("data.jsonl", None),
        ("math=data.jsonl", None),
        ("mydata.x=1", None),
        ("data=x", None),
    ],
)
def test_settings_of_hydra(token, found):
    assert parse_override(token) == found


def test_values_of_flags_are_left_alone(argv, tmp_path):
    """A path that contains a section's name is a value."""
    names = ["--eval-prompt-data", "data.x", argv[argv.index("--prompt-data") + 1]]
    assert parse_args([*argv, *names], BACKENDS).evaluation.eval_prompt_data == names[1:]


def test_sections_of_verl_in_a_file(tmp_path):
    file = tmp_path / "verl.yaml"
    verl = "actor_rollout_ref:\n  rollout: {n: 8, odd: 1, max_num_seqs: 4}\n  actor: {optim: {lr: 1e-6}}\n"
    file.write_text(f"{verl}num_generations: 4\n")
    (text,) = problems_of(["--config", str(file)])
    for words in (
        "rollout.n=8 -> --n-samples-per-prompt 8",
        "rollout.max_num_seqs=4 -> --vllm-max-num-seqs 4",
        "actor.optim.lr=1e-6 -> --lr 1e-6",
        "rollout.odd=1 -> leave it out, or look for a flag with `vime flags odd`",
        f"{file}, line 4: num_generations=4 -> --n-samples-per-prompt 4",
    ):
        assert words in re.sub(" +", " ", text), text


def test_an_unlisted_setting_of_verl_leads_to_the_search():
    (text,) = problems_of(["++actor_rollout_ref.rollout.odd=1"])
    assert text == (
        "actor_rollout_ref.rollout.odd is not a known flag; it is spelled as a setting of verl, and no flag is "
        "known for it: leave it out, or look for a flag with `vime flags odd`"
    )
