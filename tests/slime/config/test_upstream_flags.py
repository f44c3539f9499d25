"""Every flag of slime and of upstream vime that is known has an effect, leaves a note, or ends in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import good_argv

from slime.config.core_table import core_flags
from slime.config.megatron_flags import HISTORICAL, MODEL_ARGS
from slime.config.unsupported import NO_EFFECT, UNSUPPORTED
from slime.rules import parse_args
from slime.rules.flags import own_flags
from slime.rules.listing import unsupported_flags
from slime.rules.parser import check_flags
from vime.backends import BACKENDS

UPSTREAM = Path(__file__).with_name("upstream_flags.txt")


def outcome_of(name: str) -> str:
    """Returns what a run does with a flag: it has an effect, leaves a note, is refused, or describes the model."""
    backends = list(BACKENDS.values())
    tables = {
        "effect": [own_flags(), HISTORICAL, core_flags(), *(b.specs for b in backends)],
        "refused": [UNSUPPORTED, *(b.unsupported for b in backends)],
        "note": [NO_EFFECT, *(b.no_effect for b in backends)],
        "model": [MODEL_ARGS],
    }
    return next(
        (what for what, owners in tables.items() if any(name in owner for owner in owners)), "unknown"
    )


def upstream() -> dict[str, str]:
    """Returns flag -> outcome, for the flags of slime and of upstream vime in their newest versions that were read."""
    return dict(line.split("\t") for line in UPSTREAM.read_text().splitlines())


def test_every_flag_of_upstream_has_the_outcome_on_record():
    wanted = upstream()
    found = {flag: outcome_of(flag[2:].replace("-", "_")) for flag in wanted}
    assert found == wanted, f"change the flag's owner, or its line in {UPSTREAM.name}"
    assert "unknown" not in wanted.values() and len(wanted) > 250


@pytest.mark.parametrize("flag", [flag for flag, what in upstream().items() if what == "refused"])
def test_refused_flags_of_upstream_end_in_one_line_with_a_reason(flag):
    name = flag[2:].replace("-", "_")
    entry = unsupported_flags(BACKENDS)[name]
    with pytest.raises(ValueError) as error:
        check_flags([flag, *([] if entry.default is False else ["77"])], BACKENDS)
    text = str(error.value)
    assert text.startswith(f"{flag} must be left ") and text.endswith(entry.why) and "\n" not in text
    assert len(entry.why) > 15


def test_values_with_the_same_result_leave_a_note(tmp_path):
    config = parse_args([*good_argv(tmp_path), "--rollout-data-transport", "nixl"], BACKENDS)
    assert (
        "--rollout-data-transport nixl is taken as object-store, which gives the same result" in config.notes
    )
    with pytest.raises(
        ValueError, match=r"--save-debug-rollout-data must not end with \.straw\.json, .* got x_"
    ):
        parse_args([*good_argv(tmp_path), "--save-debug-rollout-data", "x_{rollout_id}.straw.json"], BACKENDS)
    flags = "--rollout-data-dir /x --rollout-queue-online-gc --flush-cache-interval 1"
    notes = parse_args([*good_argv(tmp_path), *flags.split()], BACKENDS).notes
    assert [note.split(" has no effect")[0] for note in notes] == [
        "--rollout-data-dir",
        "--rollout-queue-online-gc",
    ]
