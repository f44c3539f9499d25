"""Settings of TRL and verl are answered with the flags of this project."""

import re
from collections import Counter
from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config.peer_names import PEER_NAMES as OWN
from slime.config.peer_names import TRL, VERL, override_of
from slime.rules.parser import check_flags, parse_args
from vime.backends import BACKENDS
from vime.list_flags import all_rows
from vime.vllm.peer_names import VLLM_PEER_NAMES

PEER_NAMES = OWN | VLLM_PEER_NAMES


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def problems_of(argv: list[str]) -> list[str]:
    with pytest.raises(ValueError) as error:
        check_flags(argv, BACKENDS)
    return re.split(r"\n  \d+\. |\A\d+ problems:\n", str(error.value))


def test_each_name_of_the_table_is_answered_behind_the_error():
    """All in one command, with dashes where a name has underscores too, and as Hydra spells the names of verl."""
    assert Counter(each.program for each in PEER_NAMES.values()) >= Counter({TRL: 30, VERL: 30})
    plain = [token for name in PEER_NAMES for token in (f"--{name}", "1")]
    dashed = [
        token
        for name, e in PEER_NAMES.items()
        if e.program == TRL
        for token in (f"--{name.replace('_', '-')}", "1")
    ]
    hydra = [f"{name}=1" for name, each in PEER_NAMES.items() if each.program == VERL]
    for given in (plain, dashed, hydra):
        text = "\n".join(problems_of(given))
        for token in given[:: 1 if given is hydra else 2]:
            typed = token.partition("=")[0]
            answer = PEER_NAMES[typed.lstrip("-").replace("-", "_")].answer()
            assert f"{typed} is not a known flag; {answer}" in text


def test_each_flag_of_the_table_exists():
    """Flags of the plan's owner, of Megatron and of vLLM; also those in the notes."""
    known = {row["flag"] for row in all_rows()}
    for each in PEER_NAMES.values():
        wanted = re.findall(r"--[a-z][a-z0-9-]*", f"{each.flags} {each.note}")
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
    assert override_of(token) == found


def test_values_of_flags_are_left_alone(argv, tmp_path):
    """A path that contains a section's name is a value."""
    names = ["--eval-prompt-data", "data.x", argv[argv.index("--prompt-data") + 1]]
    assert parse_args([*argv, *names], BACKENDS).evaluation.eval_prompt_data == names[1:]


def test_sections_of_verl_in_a_file(tmp_path):
    file = tmp_path / "verl.yaml"
    verl = "actor_rollout_ref:\n  rollout: {n: 8, odd: 1, max_num_seqs: 4}\n  actor: {optim: {lr: 1e-6}}\n"
    file.write_text(f"{verl}num_generations: 4\n")
    text = "\n".join(problems_of(["--config", str(file)]))
    names = ("rollout.n", "rollout.max_num_seqs", "actor.optim.lr")
    for name in (*(f"actor_rollout_ref.{each}" for each in names), "num_generations"):
        assert PEER_NAMES[name].answer() in text
    assert "for other settings of verl, see docs/from-verl.md" in text


def test_an_unlisted_setting_of_verl_leads_to_the_page():
    (text,) = problems_of(["++actor_rollout_ref.rollout.odd=1"])
    assert text == (
        "actor_rollout_ref.rollout.odd is not a known flag; it is spelled as a setting of verl; "
        "docs/from-verl.md has the flags of this project"
    )
