"""Tests flags that cannot be combined with adapters: each error has the rule, the value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from config_cases import good_argv, write_model
from safetensors.torch import save_file

from slime.models.lora import CONFIG_FILE, WEIGHTS_FILE, Lora
from slime.rules.parser import parse_args

ALONE = "--lora-rank must be given with"
LEFT_OUT = "must be left out with --lora-rank, got"


def peft(directory: Path) -> Path:
    """Writes a PEFT directory of rank 4."""
    directory.mkdir()
    config = Lora(4, 8.0, 0.0, ("q_proj",)).peft("base", ["model.layers.0.self_attn.q_proj"])
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, directory / WEIGHTS_FILE)
    return directory


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-merge", f"{ALONE} --lora-merge, got True alone; add it"),
        ("--target-modules q_proj v_proj", f"{ALONE} --target-modules, got q_proj v_proj alone; add it"),
        ("--lora-dropout 0.1", f"{ALONE} --lora-dropout, got 0.1 alone; add it"),
        ("--lora-rank -1", "--lora-rank must be"),
        ("--lora-rank 8 --lora-alpha 0", "--lora-alpha must be"),
        ("--lora-rank 8 --lora-dropout 1", r"--lora-dropout must lie in \[0, 1\), got 1.0"),
        (
            "--lora-rank 8 --target-modules c_attn",
            "--target-modules must name modules of the model, got c_attn, which matches none; it has down_proj, ",
        ),
        (
            "--lora-rank 8 --target-modules all-linear q_proj",
            "--target-modules must be all-linear alone or names, got all-linear q_proj; leave out one",
        ),
        ("--exclude-modules q_proj", f"{ALONE} --exclude-modules, got q_proj alone; add it"),
        (
            "--lora-rank 8 --exclude-modules q_proj,c_attn",
            "--exclude-modules must name modules of the model, got c_attn, which matches none; it has down_proj, ",
        ),
        (
            "--lora-rank 8 --target-modules q_proj --exclude-modules q_proj",
            "--exclude-modules must leave a module with an adapter, got q_proj; leave some out",
        ),
        (
            "--lora-load PEFT --exclude-modules v_proj",
            r"--exclude-modules must be \[\] as in --lora-load .*, got \['v_proj'\]; leave",
        ),
        (
            "--lora-rank 8 --only-train-params-name-list a",
            f"--only-train-params-name-list {LEFT_OUT} a; the ad",
        ),
        (
            "--lora-rank 8 --freeze-params-name-list a",
            f"--freeze-params-name-list {LEFT_OUT} a; the adapters",
        ),
        (
            "--lora-rank 8 --use-kl-loss --kl-loss-coef 0.1 --ref-load MODEL --ref-update-interval 2",
            f"--ref-update-interval {LEFT_OUT} 2; the reference model is the base",
        ),
        (
            "--lora-rank 8 --transformer-impl transformer_engine",
            "--transformer-impl must be local with --lora-rank, got transformer_engine; leave the flag out",
        ),
        ("--lora-rank 8 --lora-name a/b", "--lora-name must be letters, digits, - and _, got 'a/b'; engines"),
        (
            "--lora-rank 8 --ref-load OTHER",
            "--lora-merge must be given where adapters are trained over other weights than --hf-checkpoint, got ",
        ),
        ("--lora-load MODEL", "--lora-load must name a PEFT directory with adapter_config.json, got "),
        (
            "--lora-load PEFT --lora-rank 8",
            "--lora-rank must be 4 as in --lora-load .*, got 8; leave --lora-rank",
        ),
        ("--lora-load PEFT --lora-alpha 9", "--lora-alpha must be 8.0 as in --lora-load .*, got 9.0; leave"),
        (
            "--lora-load PEFT --target-modules v_proj",
            r"--target-modules must be \['q_proj'\] as in --lora-load .*, got \['v_proj'\]; leave",
        ),
    ],
)
def test_each_error_names_the_flag(tmp_path: Path, flags: str, message: str) -> None:
    argv = good_argv(tmp_path)
    places = {
        "MODEL": str(tmp_path / "model"),
        "OTHER": str(write_model(tmp_path / "other")),
        "PEFT": str(peft(tmp_path / "peft")),
    }
    with pytest.raises(ValueError, match=message):
        parse_args([*argv, *(places.get(word, word) for word in flags.split())])


def test_a_peft_directory_gives_rank_alpha_and_targets(tmp_path: Path) -> None:
    config = parse_args([*good_argv(tmp_path), "--lora-load", str(peft(tmp_path / "peft"))])
    assert Lora.of(config) == Lora(4, 8.0, 0.0, ("q_proj",))


def test_merged_weights_need_neither_the_slot_nor_the_same_base(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    save_file({"x": torch.zeros(1)}, other / "model.safetensors")
    flags = ["--lora-rank", "8", "--lora-merge", "--ref-load", str(other)]
    assert Lora.of(parse_args([*good_argv(tmp_path), *flags])) == Lora(8, 32.0)


def test_other_names_of_flags_mean_the_same(tmp_path: Path) -> None:
    argv = good_argv(tmp_path)
    flags = "--lora-rank 8 --target-modules q_proj,v_proj,o_proj --exclude-modules o_proj --lora-adapter-name mine"
    config = parse_args([*argv, *flags.split()])
    assert Lora.of(config) == Lora(8, 32.0, 0.0, ("q_proj", "v_proj", "o_proj"), ("o_proj",))
    assert config.lora.lora_name == "mine"
    both = parse_args([*argv, *flags.split(), "--lora-name", "other"])
    assert both.lora.lora_name == "other"
    assert "--lora-adapter-name has no effect: --lora-name is given, which is the same flag" in both.notes


def test_types_of_adapters_with_the_same_result_leave_a_note(tmp_path: Path) -> None:
    argv = [*good_argv(tmp_path), "--lora-rank", "8"]
    same = parse_args([*argv, "--lora-type", "canonical_lora"])
    assert "--lora-type canonical_lora is taken as lora, which gives the same result" in same.notes
    assert not parse_args([*argv, "--lora-type", "lora"]).notes
    with pytest.raises(ValueError, match="--lora-type must be left at lora in this version, got dora; plain"):
        parse_args([*argv, "--lora-type", "dora"])
