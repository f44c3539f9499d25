"""A run, or an export, that would write to the folder of a model fails before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config import Config
from slime.rules import parse_args
from vime.commands.export import main as export
from vime.start.written_models import check_written_models

MODEL = '{"model_type": "qwen3"}'


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    for name in ("other", "hf-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(MODEL)
    return [*good_argv(tmp_path), "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "save")]


def check(argv: list[str], *more: str) -> Config:
    return parse_args([*argv, *more], rules=(check_written_models,))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--run-dir other",
            "--run-dir must be a folder without a model, got other, which holds one; name another",
        ),
        (
            "--save other",
            "--save must be a folder without a model, got other, which holds one; name another folder",
        ),
        ("--save-hf other", "--save-hf must be a folder without a model, got other, which holds one"),
        (
            "--save-hf hf-{rollout_id:d}",
            "--save-hf must be a folder without a model, got hf-3, which holds one",
        ),
        (
            "--save-hf save",
            "--save-hf must be a folder of its own, got save, which the run uses for something else",
        ),
        ("--save-hf {hf} --overwrite", "--save-hf must be a folder of its own, got {hf}, which the run uses"),
        (
            "--run-dir data --overwrite",
            "--run-dir must be a folder whose config.json is that of a run, got data/config.json, which a run would "
            "replace; name another folder",
        ),
    ],
)
def test_folders_of_models_and_data(argv, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.json").write_text('{"download": true}')
    hf = argv[argv.index("--hf-checkpoint") + 1]
    with pytest.raises(ValueError) as error:
        check(argv, *flags.replace("{hf}", hf).split())
    found = str(error.value).replace(hf, "{hf}").replace(f"{tmp_path}/", "")
    assert message in found


def test_what_a_run_wrote_may_be_written_again(argv, tmp_path):
    new = check(argv, "--save-hf", str(tmp_path / "new-{rollout_id}"))
    Path(new.logging.run_dir).mkdir()
    new.save_json(Path(new.logging.run_dir) / "config.json")
    check(argv, "--save-hf", str(tmp_path / "hf-{rollout_id}"), "--overwrite")
    (tmp_path / "save" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000003" / "metadata.json").touch()
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("3")
    check(argv, "--load", str(tmp_path / "save"), "--save-hf", str(tmp_path / "hf-{rollout_id}"))


@pytest.mark.parametrize("kind", ["hf", "torch_dist"])
def test_an_export_replaces_no_model(argv, tmp_path, kind):
    model = str(tmp_path / "other")
    with pytest.raises(
        ValueError, match=f"--output-dir must be a folder without a model, got {model}, which holds"
    ):
        export(["--to", kind, "--load", str(tmp_path), "--hf-checkpoint", model, "--output-dir", model])
    assert (tmp_path / "other" / "config.json").read_text() == MODEL
