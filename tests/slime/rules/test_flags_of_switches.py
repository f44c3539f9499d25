"""Tests flags that have an effect only with another flag. If the other flag is missing, they give a note, or an error
for adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config import Config
from slime.config.fields import spelled
from slime.rules import parse_args
from slime.rules.flags import READ_WITH, own_flags

PAIRS = [(switches, name) for switches, names in READ_WITH.items() for name in names]
OTHER = {
    "swanlab_mode": "local",
    "wandb_mode": "offline",
    "prometheus_port": "9999",
    "load_debug_rollout_data_subsample": "0.5",
    "update_weight_delta_encoding": "overwrite",
    "update_weight_delta_checksum": "adler32",
    "eval_top_p": "0.5",
}
"""Field -> a value that is not its default, for fields that accept neither 3 nor a text."""


def notes(tmp_path: Path, *flags: str) -> list[str]:
    return [note for note in parse_args([*good_argv(tmp_path), *flags]).notes if "has no effect" in note]


def given(name: str) -> list[str]:
    kind = own_flags()[name].kind
    value = [] if kind is bool else [OTHER.get(name, "3" if kind in (int, float) else "x")]
    return [spelled(name), *value]


@pytest.mark.parametrize(
    ("switches", "name"), PAIRS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_flag_without_its_switch_has_a_note(tmp_path, switches, name):
    (tmp_path / "sums.jsonl").write_text('{"input": "1+1="}\n')
    (tmp_path / "eval.yaml").write_text(
        f"eval: {{datasets: [{{name: sums, path: {tmp_path}/sums.jsonl}}]}}\n"
    )
    values = {
        "eval_prompt_data": ["sums", str(tmp_path / "sums.jsonl")],
        "eval_config": [str(tmp_path / "eval.yaml")],
        "eval_function_path": ["slime.rollout.sft_rollout.generate_rollout"],
    }
    flags = [spelled(name), *values[name]] if name in values else given(name)
    argv = [word for word in good_argv(tmp_path) if word != "--use-dynamic-batch-size"]
    try:
        found = [note for note in parse_args([*argv, *flags]).notes if "has no effect" in note]
    except ValueError as error:
        pytest.fail(f"{name}: {error}")
    (note,) = [note for note in found if note.startswith(spelled(name))]
    needed = " or ".join(spelled(switch.partition("=")[0]) for switch in switches)
    assert note.replace(" delta:", ":").endswith(f"has no effect without {needed}: it is read only there")


def test_a_switch_that_is_on_and_a_value_that_another_flag_gave_leave_no_note(tmp_path):
    assert notes(tmp_path) == []
    assert notes(tmp_path, "--use-tensorboard", "--tb-project-name", "x") == []
    assert notes(tmp_path, "--use-prometheus", "--wandb-group", "x", "--prometheus-port", "9999") == []
    assert notes(tmp_path, "--rollout-temperature", "0.7", "--reward-key", "score") == []
    assert notes(tmp_path, "--save", str(tmp_path / "saved"), "--save-interval", "1", "--async-save") == []


def test_a_note_shows_no_secret(tmp_path):
    (note,) = notes(tmp_path, "--wandb-key", "abc123")
    assert note == "--wandb-key has no effect without --use-wandb: it is read only there"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--lora-alpha", "64"], "--lora-alpha, got 64.0"),
        (["--lora-name", "mine"], "--lora-name, got mine"),
        (["--lora-dropout", "0.1"], "--lora-dropout, got 0.1"),
        (["--lora-merge"], "--lora-merge, got True"),
        (["--target-modules", "q_proj", "v_proj"], "--target-modules, got q_proj v_proj"),
        (["--lora-rank", "0", "--lora-alpha", "16"], "--lora-alpha, got 16.0"),
    ],
)
def test_flags_of_adapters_without_a_rank_are_errors(tmp_path, flags, shown):
    with pytest.raises(ValueError) as error:
        parse_args([*good_argv(tmp_path), *flags])
    assert f"--lora-rank must be given with {shown} alone; add it" in str(error.value)


def test_a_flag_of_adapters_at_its_default_has_a_note(tmp_path):
    (note,) = notes(tmp_path, "--lora-alpha", "32")
    assert note == "--lora-alpha 32.0 has no effect without --lora-rank: it is read only there"
    found: Config = parse_args([*good_argv(tmp_path), "--lora-rank", "4", "--lora-alpha", "32"])
    assert not [note for note in found.notes if "lora" in note]
