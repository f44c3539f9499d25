"""Tests the teachers that a run can have: flags that fit together, and the policy's own vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import good_argv, write_model

from slime.roles.served import ServedModel, frozen_devices, served_models
from slime.rules.parser import parse_args

WEIGHTS = "model.safetensors"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def teacher_of(folder: Path, **changes: object) -> list[str]:
    """Writes a teacher without tensors: its config.json and an index, which `vime plan` reads."""
    teacher = write_model(folder / "teacher", **changes)
    (teacher / f"{WEIGHTS}.index.json").write_text('{"weight_map": {}}')
    return ["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(teacher)]


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--opd-kl-coef 0.5", "--use-opd must be given with --opd-kl-coef, got only 0.5"),
        ("--use-opd", "--opd-type must be given with --use-opd, got none; megatron"),
        (
            "--use-opd --opd-type megatron",
            "--opd-teacher-load must be given with --opd-type megatron, got none",
        ),
        (
            "--use-opd --opd-type sglang --opd-teacher-load x",
            "--opd-teacher-load must be left out with --opd-type sglang, got x; engines of the run",
        ),
        (
            "--use-opd --opd-type megatron --opd-teacher-load nowhere",
            "--opd-teacher-load must name a Hugging Face directory with model.safetensors or",
        ),
        (
            "--use-opd --opd-type vllm --opd-loss-type forward_kl",
            "--opd-top-k must be above 0 with --opd-loss-type forward_kl, got 0; its sum is over that many",
        ),
        (
            "--use-opd --opd-type vllm --opd-loss-type jsd --opd-top-k 8 --opd-jsd-beta 1",
            "--opd-jsd-beta must lie between 0 and 1, got 1.0; at the ends the divergence is 0",
        ),
        (
            "--use-opd --opd-type vllm --opd-loss-type forward_kl --opd-top-k 8 --opd-jsd-beta 0.3",
            "--opd-jsd-beta must not be combined with --opd-loss-type forward_kl, got both",
        ),
        (
            "--use-opd --opd-type vllm --opd-loss-type jsd --opd-top-k 8 --opd-kl-coef 2",
            "--opd-kl-coef must not be combined with --opd-loss-type jsd, got both; .* the weight --opd-loss-coef",
        ),
        (
            "--use-opd --opd-type vllm --opd-loss-type jsd --opd-top-k 8 --loss-type custom_loss "
            "--custom-loss-function-path json.loads",
            "--loss-type custom_loss must not be combined with --opd-loss-type jsd, got both",
        ),
        (
            "--use-opd --opd-type vllm --opd-loss-type jsd --opd-top-k 8 --rollout-top-p 0.9 --replay-kept-tokens 9",
            "--replay-kept-tokens must not be combined with --opd-loss-type jsd, got both",
        ),
        (
            "--use-opd --opd-type vllm --opd-loss-coef 2",
            "--opd-loss-coef must be left out with --opd-loss-type reverse_kl, got both",
        ),
        ("--opd-loss-type jsd", "--use-opd must be given with --opd-loss-type, got only jsd"),
        ("--use-opd --opd-type tf", "--opd-type must be one of megatron, sglang, vllm, got tf"),
        (
            "--use-opd --opd-type vllm --disable-compute-advantages-and-returns",
            "--use-opd must not be combined with --disable-compute-advantages-and-returns, got both",
        ),
        (
            "--use-opd --opd-type vllm --loss-type sft_loss",
            "--use-opd must not be combined with --loss-type sft_loss, got both",
        ),
        ("--use-opd --opd-type vllm", "--opd-teacher-model must be given with --opd-type vllm, got none; or"),
        (
            "--use-opd --opd-type megatron --opd-teacher-load x --opd-teacher-model y",
            "--opd-teacher-model must be left out with --opd-type megatron, got .'default=y'.",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-model a b",
            "--opd-teacher-model must have one value for each source, got a and b for default",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-url m=http://a m=http://b",
            "--opd-teacher-url must have one value for each source, got http://a and http://b for m",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-url m=http://a --opd-teacher-model b",
            "--opd-teacher-model and --opd-teacher-url must not be combined, got 1 of --opd-teacher-model and 1 of",
        ),
        (
            "--use-opd --opd-type vllm --rm-url http://a --opd-teacher-num-gpus 2",
            "--opd-teacher-model must be given with --opd-teacher-num-gpus, got only 2",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-model a --opd-teacher-num-gpus 3 "
            "--opd-teacher-num-gpus-per-engine 2",
            "--opd-teacher-num-gpus must be a multiple of --opd-teacher-num-gpus-per-engine, got 3 and 2",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-model a --opd-teacher-num-gpus-per-engine 12",
            "--opd-teacher-num-gpus-per-engine must be a multiple of --num-gpus-per-node .*got 12 and 8; use 8 or 16",
        ),
        (
            "--use-opd --opd-type sglang --opd-teacher-model a --rollout-temperature 0.7",
            "--rollout-temperature must be 1 with teachers of the run and --opd-type sglang, got 0.7",
        ),
        (
            "--use-opd --opd-type vllm --rm-url http://a --opd-top-k 65",
            "--opd-top-k must be at most the model's vocab_size, got 65 and 64",
        ),
        (
            "--use-opd --opd-type vllm --opd-teacher-model nowhere",
            "--opd-teacher-model must name a Hugging Face directory, got nowhere",
        ),
    ],
)
def test_flags_of_a_teacher_fit_together(argv, flags, rule):
    with pytest.raises(ValueError, match=rule):
        parse_args([*argv, *flags.split()])


def test_notes_on_a_teacher(argv):
    served = [*argv, "--use-opd", "--opd-type", "vllm", "--rm-url", "http://teacher:8000"]
    assert not any("temperature" in note for note in parse_args(served).notes)
    warm = parse_args([*served, "--rollout-temperature", "0.7", "--rm-type", "math"])
    assert any("the policy's at --rollout-temperature 0.7" in note for note in warm.notes)
    assert warm.reward.rm_type == "zero" and any("math is taken as zero" in note for note in warm.notes)
    labelled = parse_args([*served, "--rm-type", "math", "--label-key", "label"])
    assert labelled.reward.rm_type == "math"


def test_a_teacher_of_another_shape_is_accepted(argv, tmp_path):
    larger = teacher_of(tmp_path, num_hidden_layers=6, hidden_size=256)
    assert parse_args([*argv, *larger]).distillation.use_opd
    # The tokenizer is the same, and the matrix has padding rows.
    padded = teacher_of(tmp_path, vocab_size=128)
    assert parse_args([*argv, *padded]).distillation.opd_kl_coef == 1.0


def test_served_models_are_records(argv, tmp_path):
    """The policy comes first, then one frozen model per teacher, at the temperature of the samples."""
    teacher = str(write_model(tmp_path / "large", num_hidden_layers=6))
    flags = ["--use-opd", "--opd-type", "vllm", "--opd-teacher-model", f"math={teacher}", teacher]
    more = [
        "--rollout-temperature",
        "0.7",
        "--opd-top-k",
        "8",
        "--opd-teacher-engine-args",
        "max-model-len=64",
    ]
    c = parse_args([*argv, *flags, *more, "--opd-teacher-num-gpus", "2"])
    policy, math, default = served_models(c)
    assert (policy.name, policy.frozen, policy.devices, policy.temperature) == ("policy", False, 2, 1.0)
    assert (math.name, default.name) == ("teacher-math", "teacher-default")
    assert (
        math == ServedModel("teacher-math", teacher, "vllm", 2, 1, True, ("max-model-len=64",), 8, 0.7)
        and frozen_devices(c) == 4
    )
    assert not any("temperature" in note for note in c.notes)
    assert served_models(parse_args([*argv, *flags, "--debug-train-only"])) == ()


def test_a_served_teacher_of_another_vocabulary_is_an_error(argv, tmp_path):
    smaller = write_model(tmp_path / "smaller", vocab_size=63)
    flags = ["--use-opd", "--opd-type", "vllm", "--opd-teacher-model", f"code={smaller}"]
    with pytest.raises(
        ValueError, match="--opd-teacher-model code must have the vocabulary of --hf-checkpoint"
    ):
        parse_args([*argv, *flags])


def test_a_teacher_of_another_vocabulary_is_an_error(argv, tmp_path):
    smaller = teacher_of(tmp_path, vocab_size=63)
    with pytest.raises(ValueError, match="vocabulary of --hf-checkpoint.*got vocab_size 63 in .* and 64 in"):
        parse_args([*argv, *smaller])
    other = teacher_of(tmp_path)
    path = tmp_path / "teacher" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {"a": 1, "b": 0}
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="tokenizer of --hf-checkpoint.* another id or none for 2 of 27 tokens"
    ):
        parse_args([*argv, *other])
    path.unlink()
    assert parse_args([*argv, *other])  # the size fits, and nothing else can be checked
    unknown = teacher_of(tmp_path, vocab_size=128)
    path.unlink()
    with pytest.raises(ValueError, match="got vocab_size 128 in"):
        parse_args([*argv, *unknown])


def test_a_teacher_fits_the_parallel_sizes(argv, tmp_path):
    narrow = teacher_of(tmp_path, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(
        ValueError, match="--opd-teacher-load must fit the trainer's parallel sizes, got .*heads"
    ):
        parse_args([*argv, *narrow, "--tensor-model-parallel-size", "2"])
