"""`vime compare` prints the differences between two sides in Markdown, with intervals over pairs of seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from view_cases import write_metrics, write_run

from vime.cli import main
from vime.view.compare import comparison


def text_of(one: Path | str, other: Path | str) -> str:
    return "\n".join(comparison(str(one), str(other)))


def seeds(root: Path, side: str, shifts: dict[int, float], **flags: object) -> str:
    for seed, shift in shifts.items():
        run = write_run(root / f"{side}-{seed}", rollouts=0, seed=seed, **flags)
        write_metrics(run, range(8), shift)
        (run / "environment.json").write_text(json.dumps({"packages": {"torch": "2.13"}, "time": str(seed)}))
    return str(root / f"{side}-*")


def test_three_seeds_a_side(tmp_path: Path) -> None:
    one = seeds(tmp_path, "a", {1: 0.0, 2: 0.5, 3: 0.2}, lr=1e-4)
    other = seeds(tmp_path, "b", {3: 0.29, 1: 0.1, 2: 0.61}, lr=5e-5)
    text = text_of(one, other)
    assert "| `--lr` | `0.0001` | `5e-05` |" in text and "--seed" not in text and "run-dir" not in text
    assert "No version and nothing of the machine differs." in text
    assert (
        "Runs of equal seeds are pairs. In brackets: the 95 % interval of the difference over 3 pairs" in text
    )
    rewards = text[text.index("`rollout/raw_reward`") :].splitlines()[2:9]
    assert rewards[0] == "| rollouts | A | B | B - A |" and rewards[2].startswith("| 0 to 1 |")
    # The pairs differ by 0.1, 0.11 and 0.09: standard deviation 0.01, t = 4.303, half = 4.303 * 0.01 / sqrt(3).
    assert rewards[-1] == "| 0 to 7 | 0.5833 ± 0.2517 | 0.6833 ± 0.2577 | **+0.1 [+0.07516, +0.1248]** |"
    assert "| 0 to 7 | 1,350 ± 0 | 1,350 ± 0 | 0 % [0, 0] |" in text
    loss = text[text.index("`train/loss`") :].splitlines()[4]
    assert loss.startswith("| 0 to 1 | 0.5 ± 0 |"), "the loss of step 1 was not finite"


def test_two_runs_and_what_is_not_known(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", rollouts=2, seed=1)
    other = write_run(tmp_path / "two", rollouts=3, error=OSError("a|b `c`"), seed=2, prompt_data="a|b `c`")
    text = text_of(one, other)
    assert "| A | `one` | finished | 2 | 1 | - |" in text and "| B | `two` | failed | 3 | 2 | - |" in text
    assert "| `--prompt-data` | `(absent)` | `a\\|b 'c'` |" in text
    assert "have different seeds" in text and "Intervals need 3 pairs; there is 1." in text
    assert "A run has no environment.json, so versions are not compared." in text
    assert "| 0 to 1 | 0.05 | 0.05 | 0 [0, 0] |" in text, "equal steps"
    older = tmp_path / "older"
    older.mkdir()
    write_metrics(older, range(3, 5))
    text = text_of(one, older)
    assert "| B | `older` | unknown | - | - | - |" in text and "The sides have no step in common." in text
    assert "A run has no config.json" in text


def test_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    refusals = {
        str(tmp_path / "none"): "RUN must be a run directory, or a pattern in quotes that names some, got",
        str(tmp_path / "no-*"): "RUN must be a run directory, or a pattern in quotes that names some, got",
        str(empty): f"RUN must be a run directory, got {empty} without config.json",
    }
    for bad, words in refusals.items():
        assert main(["compare", str(run), bad]) == 2
        assert words in capsys.readouterr().err
