"""Which teachers a run can have: flags that fit together, and the policy's own vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import good_argv, write_model

from slime.rules.parser import parse_args

WEIGHTS = "model.safetensors"


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    return good_argv(tmp_path)


def teacher_of(folder: Path, **changes: object) -> list[str]:
    """A teacher without tensors: its config.json and an index, which `vime plan` looks at."""
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
            "--opd-teacher-load must be left out with --opd-type sglang, got x; the teacher's server",
        ),
        (
            "--use-opd --opd-type megatron --opd-teacher-load nowhere",
            "--opd-teacher-load must name a Hugging Face directory with model.safetensors or",
        ),
        ("--use-opd --opd-type tf", "--opd-type must be one of megatron, sglang, vllm, got tf"),
        (
            "--use-opd --opd-type vllm --disable-compute-advantages-and-returns",
            "--use-opd must not be combined with --disable-compute-advantages-and-returns, got both",
        ),
        (
            "--use-opd --opd-type vllm --loss-type sft_loss",
            "--use-opd must not be combined with --loss-type sft_loss, got both",
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
    padded = teacher_of(tmp_path, vocab_size=128)  # the same tokenizer, and rows that pad the matrix
    assert parse_args([*argv, *padded]).distillation.opd_kl_coef == 1.0


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
    assert parse_args([*argv, *other])  # a size that fits is all that is known
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
