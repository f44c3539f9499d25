"""`python scripts/docs_algorithms.py`: the tables of docs/algorithms.md, from the records of estimators and surrogates.

A test fails if the tables differ from the output of this script. The rest of the page is written by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from slime.algo.estimators import ESTIMATORS, Estimator
from slime.algo.surrogates import CENTRED, SURROGATES, Surrogate

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs/algorithms.md")
COMMAND = "python scripts/docs_algorithms.py"
HEADS = {
    "estimators": "| `--advantage-estimator` | Advantage | Policy loss | Source | File | Lines | Columns read | "
    "Operator | Hand test | Example |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    "surrogates": "| `--pg-loss-type` | Term of a token | Source | File | Lines | Columns read | "
    "Operators | Hand test |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
    "aliases": "| Flag | Accepted names |\n| --- | --- |\n",
}
"""Name of a table -> its heading."""
TESTS = Path("tests/slime/algo")
HAND_TESTS = {
    "estimators": {
        "grpo": "test_advantage.py::test_grpo_spreads_the_reward_over_all_tokens",
        "grpo_turn": "test_group_estimators.py::test_grpo_turn_adds_the_advantage_of_the_turn",
        "gspo": "test_policy_loss.py::test_gspo_uses_one_ratio_a_sequence",
        "cispo": "test_policy_loss.py::test_cispo_keeps_the_gradient_of_clipped_tokens",
        "reinforce_plus_plus": "test_advantage.py::test_reinforce_plus_plus_discounts_from_the_last_trained_token",
        "reinforce_plus_plus_baseline": "test_advantage.py::test_reinforce_plus_plus_baseline_subtracts_the_penalty",
        "rloo": "test_group_estimators.py::test_rloo_subtracts_the_mean_of_the_others",
        "pass_at_k": "test_group_estimators.py::test_pass_at_k_of_right_and_wrong_answers",
        "ppo": "test_advantage.py::test_ppo_estimates_over_the_trained_tokens",
    },
    "surrogates": {
        "clip": "test_policy_loss.py::test_clipped_surrogate_and_its_metrics",
        "gspo": "test_policy_loss.py::test_gspo_uses_one_ratio_a_sequence",
        "gspo_token": "test_surrogates.py::test_gspo_token_has_the_value_of_gspo_and_the_gradient_of_the_token",
        "cispo": "test_policy_loss.py::test_cispo_keeps_the_gradient_of_clipped_tokens",
        "gmpo": "test_surrogates.py::test_gmpo",
        "sapo": "test_surrogates.py::test_sapo",
        "clip_cov": "test_surrogates.py::test_clip_cov_and_kl_cov_treat_chosen_tokens_apart",
        "kl_cov": "test_surrogates.py::test_clip_cov_and_kl_cov_treat_chosen_tokens_apart",
        "reinforce": "test_surrogates.py::test_reinforce",
        "--use-score-centering": "test_top_losses.py::test_centering_by_hand",
    },
}
"""Table -> record -> the test in TESTS that compares it with values computed by hand."""


def folder_of(record: Estimator | Surrogate) -> str:
    return "estimators" if isinstance(record, Estimator) else "surrogates"


def file_of(record: Estimator | Surrogate) -> tuple[str, int | str]:
    """Returns the file with the record, as a link from the page, and its number of lines."""
    folder = folder_of(record)
    for path in sorted((ROOT / "slime/algo" / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) == repr(record.name):
                return f"[{path.name}](../slime/algo/{folder}/{path.name})", text.count("\n")
    return "", ""


def hand_test_of(record: Estimator | Surrogate) -> str:
    """Returns the test as a link; empty for a record without a test. ValueError if the file has no such test."""
    key = record.flag or record.name if isinstance(record, Surrogate) else record.name
    if (name := HAND_TESTS[folder_of(record)].get(key)) is None:
        return ""
    file, _, test = name.partition("::")
    if f"def {test}(" not in (ROOT / TESTS / file).read_text(encoding="utf-8"):
        raise ValueError(
            f"{TESTS / file} must have {test}, the hand test of {record.name}; rename it in {COMMAND}"
        )
    return f"[{test.removeprefix('test_')}](../{TESTS / file})"


def source_of(record: Estimator | Surrogate) -> str:
    """Returns the paper, as a link if it is an arXiv number."""
    if re.fullmatch(r"\d{4}\.\d{5}", record.source):
        return f"[{record.source}](https://arxiv.org/abs/{record.source})"
    return record.source


def estimators() -> Iterator[str]:
    for record in ESTIMATORS.values():
        file, lines = file_of(record)
        reads = ", ".join(sorted({"rewards", *record.reads}))
        operator = "`group_advantage`" if record.centred else ""
        example = f"[{record.example}](../{record.example}/README.md)" if record.example else ""
        cells = (
            record.advantage,
            f"`{record.surrogate.name}`",
            source_of(record),
            file,
            lines,
            reads,
            operator,
        )
        yield f"| `{record.name}` | {' | '.join(map(str, cells))} | {hand_test_of(record)} | {example} |\n"


def surrogates() -> Iterator[str]:
    for record in (*SURROGATES.values(), CENTRED):
        file, lines = file_of(record)
        reads = ", ".join(
            sorted({"advantages", *record.reads, *({"chosen_tokens"} if record.choose else ())})
        )
        head = "`linear_logp`" if record.reads_sequences else "`linear_token_loss`"
        operators = f"{head}, `grpo_loss`" if record.fused else head
        cells = (record.policy, source_of(record), file, lines, reads, operators, hand_test_of(record))
        with_flag = f" with `{record.flag}`" if record.flag else ""
        yield f"| `{record.name}`{with_flag} | {' | '.join(map(str, cells))} |\n"


def aliases() -> Iterator[str]:
    from slime.rules.flags import ALIASES

    for flag, names in ALIASES.items():
        found = ", ".join(f"`{alias}` (`{name}`)" for alias, name in names.items())
        yield f"| `--{flag.replace('_', '-')}` | {found} |\n"


ROWS = {"estimators": estimators, "surrogates": surrogates, "aliases": aliases}


def table(name: str) -> str:
    """Returns a table with its heading."""
    return HEADS[name] + "".join(ROWS[name]())


def page() -> str:
    """Returns the whole page, with its tables replaced."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    for name, head in HEADS.items():
        before, _, rest = text.partition(head)
        text = before + table(name) + "\n" + rest.partition("\n\n")[2]
    return text


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
