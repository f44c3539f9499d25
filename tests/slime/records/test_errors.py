"""The error of a flag: its fields, its text, the flags that it names, and reports of several problems."""

from __future__ import annotations

import pickle

import pytest

from slime.config.problems import Problems, ProblemsError, renamed, split_problems
from slime.records.errors import FlagError, StatedError, UnknownFlag, replace_flags


@pytest.mark.parametrize(
    ("error", "text", "flags"),
    [
        (FlagError("--lr", "be above 0", -1, "raise it"), "--lr must be above 0, got -1; raise it", {"--lr"}),
        (
            FlagError("--lr", "be above --min-lr", 0),
            "--lr must be above --min-lr, got 0",
            {"--lr", "--min-lr"},
        ),
        (FlagError("--lr", "be given", None), "--lr must be given, got None", {"--lr"}),
        (FlagError("--a", "not stand", advice="drop --b"), "--a must not stand; drop --b", {"--a", "--b"}),
        (FlagError("name", "be x", "--lr", prefix="f.yaml: "), "f.yaml: name must be x, got --lr", set()),
        (UnknownFlag("--lrr", "a known flag", advice="; did you mean --lr?"), None, {"--lrr", "--lr"}),
        (StatedError("column 'a'", "is missing", "columns []", "set --b-key"), None, {"--b-key"}),
    ],
)
def test_the_text_is_built_from_the_fields(error: FlagError, text: str | None, flags: set[str]) -> None:
    assert error.flags == flags
    assert text in (None, str(error)) and pickle.loads(pickle.dumps(error)).__dict__ == error.__dict__
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == str(error.renamed(lambda flag: flag))


def test_other_forms_of_the_text() -> None:
    assert str(UnknownFlag("--lrr", "a known flag", advice="; did you mean --lr?")) == (
        "--lrr is not a known flag; did you mean --lr?"
    )
    assert str(StatedError("column 'a'", "is missing", "columns []", "set --b")) == (
        "column 'a' is missing, got columns []; set --b"
    )
    assert FlagError("RAY_X", "be token", "none", "unset it").finding == "RAY_X must be token, got none"


def test_a_value_of_the_user_names_no_flag_and_keeps_its_spelling() -> None:
    """A value may hold the text of a flag, such as a path or a misplaced word."""
    error = FlagError("--load", "be a folder", "--hf-checkpoint", "check --load").renamed(
        {"--load": "--critic-load", "--hf-checkpoint": "--x"}.get
    )
    assert str(error) == "--critic-load must be a folder, got --hf-checkpoint; check --critic-load"


def test_a_flag_that_begins_another_is_another() -> None:
    spelled = {"--rollout-num-gpus": "num_gpus"}
    assert replace_flags(
        "--rollout-num-gpus-per-engine, --rollout-num-gpus", lambda f: spelled.get(f, f)
    ) == ("--rollout-num-gpus-per-engine, num_gpus")


def report(problems: Problems) -> list[str]:
    with pytest.raises(ValueError) as caught:
        problems.report()
    return [str(problem) for problem in split_problems(caught.value)]


def test_a_problem_that_an_earlier_one_may_have_caused_is_left_out() -> None:
    problems = Problems()
    problems.add(
        UnknownFlag("--lrr", "a known flag", advice="; did you mean --lr?"), origin="run.yaml, line 2"
    )
    problems.add(FlagError("--lr", "be given"))  # of the same stage
    problems.next_stage()
    problems.add(FlagError("--min-lr", "be below --lr", 1), FlagError("--load", "be a folder", "--lr"))
    problems.add(ValueError("a text that names --lr has no fields"))
    assert report(problems) == [
        "run.yaml, line 2: --lrr is not a known flag; did you mean --lr?",
        "--lr must be given",
        "--load must be a folder, got --lr",
        "a text that names --lr has no fields",
    ]


def test_a_report_in_a_report_keeps_its_problems() -> None:
    inner, outer = Problems(), Problems()
    inner.add(FlagError("--a", "be 1", 2), FlagError("--b", "be 1", 2), FlagError("--a", "be 1", 2))
    outer.check(inner.report)
    outer.next_stage()
    outer.add(FlagError("--c", "equal --b", 3))
    assert report(outer) == ["--a must be 1, got 2", "--b must be 1, got 2"]
    with pytest.raises(
        ProblemsError, match=r"(?s)^2 problems:\n  1. --a must be 1, got 2\n  2. --b"
    ) as caught:
        outer.report()
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and [e.flags for e in again.problems] == [{"--a"}, {"--b"}]
    assert str(renamed(caught.value, str.upper)).endswith(
        "1. --A must be 1, got 2\n  2. --B must be 1, got 2"
    )
