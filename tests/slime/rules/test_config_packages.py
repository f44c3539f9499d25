"""A missing package that a flag needs is an error before anything starts. The check does not import the package."""

from __future__ import annotations

import importlib
import sys

import pytest
from config_cases import good_argv

from slime.config import Config
from slime.rules import parse_args
from slime.rules.packages import package_notes
from slime.tracking.trackers import TRACKERS


@pytest.mark.parametrize(
    ("flags", "module", "package"),
    [
        *(
            (kind.flag, kind.module, kind.package)
            for kind in TRACKERS
            if not kind.optional  # a script of slime with --use-wandb also runs without wandb
        ),
        ("--rm-type boxed_math", "math_verify", "math-verify"),
    ],
)
def test_a_package_that_a_flag_needs(tmp_path, monkeypatch, flags, module, package):
    argv = good_argv(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # this hides an installed package
    assert parse_args([*argv, "--rm-type", "gsm8k"]).data.num_rollout == 3
    with pytest.raises(ValueError) as error:
        parse_args([*argv, *flags.split()])
    assert str(error.value) == (
        f"{flags} must have the package {package}, got none installed; pip install {package}, or leave the flag out"
    )


def test_a_folder_is_no_package(tmp_path, monkeypatch):
    """A run with wandb leaves a folder with its name, which Python would import as an empty package."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    asked = Config.from_flat({"use_wandb": True, "run_dir": str(tmp_path)})
    (tmp_path / "wandb").mkdir()
    assert [note.partition(":")[0] for note in package_notes(asked)] == ["--use-wandb"]
    (tmp_path / "wandb" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert not list(package_notes(asked))
    assert "wandb" not in sys.modules, "looked for, not imported"
