"""Tests the rules of --flush-cache-interval, and the updates that drop the engines' caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.weight_sync.cache_flush import should_flush_cache
from vime.backends import parse_config

FLAG = "--flush-cache-interval"
RULE = f"{FLAG} must be a number of updates of at least 1, or never, got"
ENGINES = ["--rollout-num-gpus", "1"]
SGLANG = [*ENGINES, "--rollout-backend", "sglang", "--update-weight-transport", "disk"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [FLAG, "0"],
            f"{RULE} 0; use 1 to drop the caches at each update, and never to keep them over all updates",
        ),
        ([FLAG, "-1"], f"{RULE} -1"),
        ([FLAG, "1.5"], f"{RULE} 1.5"),
        ([FLAG, "always"], f"{RULE} always"),
        ([FLAG, "2", *SGLANG], f"{FLAG} must be 1 with --rollout-backend sglang, got 2"),
        ([FLAG, "2", "--rlk-consistency", "strict"], f"must be off or audit with {FLAG} 2, got strict"),
        (
            [FLAG, "never", "--rlk-bitwise", "--rlk-consistency", "strict"],
            f"{FLAG} must be 1 with --rlk-bitwise, got never",
        ),
        (
            [FLAG, "2", "--device", "cuda", "--colocate", "--transformer-impl", "local", "--bf16"],
            f"{FLAG} must be 1 with --colocate on GPUs, got 2",
        ),
    ],
)
def test_bad_flags(tmp_path: Path, flags: list[str], message: str) -> None:
    argv = [token for token in good_argv(tmp_path) if token != "--colocate" or "--colocate" in flags]
    with pytest.raises(ValueError) as error:
        parse_config([*argv, *(ENGINES if "--colocate" not in flags else ()), *flags])
    assert message in str(error.value)


@pytest.mark.parametrize(("value", "interval"), [("1", 1), ("2", 2), ("16", 16), ("never", None)])
def test_the_interval_counts_updates(tmp_path: Path, value: str, interval: int | None) -> None:
    argv = [token for token in good_argv(tmp_path) if token != "--colocate"]
    config = parse_config([*argv, *ENGINES, FLAG, value])
    assert config.weight_update.flush_interval == interval
    assert any(FLAG in note for note in config.notes) == (interval != 1)
    corrected = parse_config([*argv, *ENGINES, FLAG, value, "--use-tis"])
    assert not any(FLAG in note for note in corrected.notes)


@pytest.mark.parametrize(
    ("interval", "flushes"),
    [(1, [1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (4, [1, 5]), (0, [1])],
)
def test_the_first_update_and_then_every_nth_drop_the_caches(interval: int, flushes: list[int]) -> None:
    assert [update for update in range(1, 7) if should_flush_cache(interval, update)] == flushes
