"""Readers of run directories return a result or raise a ValueError for generated and damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from run_readers import READERS, read_with
from view_cases import write_run

from slime.tracking.kinds import KINDS

NAMES = sorted({name for kind in KINDS.values() for name in kind.allowed})
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["finished", "serving", "dead", "starting", "engine-0", "policy", "train", "\x1b[31m"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
EVENTS = st.fixed_dictionaries(
    {
        "time": st.floats(0, 2e9) | VALUES,
        "source": st.sampled_from(["driver", "rollout", "engines", "trainer-0"]) | VALUES,
        "kind": st.sampled_from(sorted(KINDS)) | VALUES,
    },
    optional={name: LEAVES | st.lists(st.integers(0, 9), max_size=3) | VALUES for name in NAMES},
)
ROWS = st.fixed_dictionaries(
    {
        "step_key": st.sampled_from(["rollout/step", "train/step", "eval/step"]) | VALUES,
        "step": st.integers(0, 2**54) | VALUES,
    },
    optional={
        name: st.floats() | VALUES
        for name in ("rollout/raw_reward", "train/loss", "perf/step_time", "eval/x")
    },
)
SAMPLES = st.dictionaries(
    st.sampled_from(["place", "tokens", "prompt", "response", "versions", "version"]), VALUES
)


def lines(values: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    as_json = st.lists(values, max_size=12).map(
        lambda found: b"".join(json.dumps(one).encode() + b"\n" for one in found)
    )
    return as_json | st.binary(max_size=200)


def test_readers_take_any_lines(fuzz: Callable[..., None], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "samples").mkdir()
    right = {name: (run / name).read_bytes() for name in ("events.jsonl", "metrics.jsonl", "config.json")}

    def check(case: tuple[bytes, bytes, bytes, bytes]) -> None:
        events, metrics, samples, config = case
        (run / "events.jsonl").write_bytes(right["events.jsonl"] + events)
        (run / "metrics.jsonl").write_bytes(metrics + right["metrics.jsonl"])
        (run / "samples" / "0.jsonl").write_bytes(samples)
        (run / "config.json").write_bytes(config)
        for name in READERS:
            read_with(name, run)

    configs = VALUES.map(lambda value: json.dumps(value).encode()) | st.just(right["config.json"])
    fuzz(check, st.tuples(lines(EVENTS), lines(ROWS), lines(SAMPLES), configs))


def test_readers_take_any_damage(fuzz: Callable[..., None], tmp_path: Path) -> None:
    """Bytes are changed, cut out or moved, as by a failing disk."""
    run = write_run(tmp_path / "run")
    right = {name: (run / name).read_bytes() for name in ("events.jsonl", "metrics.jsonl")}

    def check(case: list[tuple[str, int, int, bytes]]) -> None:
        files = dict(right)
        for name, at, size, new in case:
            place = at % len(right[name])
            files[name] = files[name][:place] + new + files[name][place + size :]
        for name, content in files.items():
            (run / name).write_bytes(content)
        for name in READERS:
            read_with(name, run)

    change = st.tuples(
        st.sampled_from(sorted(right)), st.integers(0, 10**6), st.integers(0, 40), st.binary(max_size=4)
    )
    fuzz(check, st.lists(change, min_size=1, max_size=6))
