"""docs/benchmarks.md: that it is what the measured files say, and that it says what a reader must know."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_cases import full_steps

from vime.bench import published
from vime.bench.compare import pairs_of
from vime.bench.published import (
    COMMAND,
    EXAMPLES,
    IMAGES,
    PAGE,
    RESULTS,
    ROOT,
    page,
    read_results,
    stale,
    write,
)
from vime.bench.record import SIDES, Record
from vime.bench.report import MOE_LIMIT
from vime.bench.settings import read_settings
from vime.bench.verdicts import STEP, TRAINER_PEAK, TRAINING, Comparison, compared


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A root with the measured files alone."""
    shutil.copytree(ROOT / RESULTS, tmp_path / RESULTS)
    return tmp_path


def commands_of(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        yield from [content["command"]] if "command" in content else content.get("commands", [])
    for part in (
        content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    ):
        yield from commands_of(part)


def test_the_page_is_what_the_files_say():
    found = stale(ROOT, read_results(ROOT))
    assert not found, f"{'; '.join(found)}: run {COMMAND}"


def test_a_reader_learns_in_the_first_screen_what_is_fast_what_is_missed_and_where():
    """Labels alone: what stands behind them is compared with the files as a whole."""
    screen = "\n".join((ROOT / PAGE).read_text().splitlines()[:26])
    assert "Measured on **NVIDIA H200**" in screen
    assert "- **LM head and loss** (`linear_token_loss" in screen and "of the bare matrix products" in screen
    assert "- **Slower** than" in screen
    assert "The baseline is Megatron's cross entropy of float32 logits" in screen
    assert re.search(r"\*\*Targets of operators\*\* \d+ met, \*\*\d+ missed\*\*, each named", screen)
    assert re.search(r"\*\*Targets of runs\*\* \d+ met, \*\*\d+ missed\*\*", screen)


def test_the_table_of_measured_runs_is_what_the_records_say():
    """A row a record of --rl-kernel-ops: means of both sides, and how much less with its interval."""
    lines = (ROOT / "docs/measured.md").read_text().splitlines()
    results = [r for r in read_results(ROOT) if isinstance(r.content, Record)]
    listed = [r for r in results if r.content.switch["field"] == "rl_kernel_ops"]
    assert listed
    for result in listed:
        found = {c.metric.name: c for c in compared(result.content, pairs_of(result.content)[0])}
        shown = [TRAINING, TRAINER_PEAK, STEP] if result.content.tier == "e2e" else [TRAINING, TRAINER_PEAK]
        cells = [cell for name in shown for cell in less(found[name])]
        link = f"(benchmarks.md#{result.name.replace('_', '-')})"
        (row,) = [line for line in lines if link in line and line.startswith("|")]
        assert [cell.strip() for cell in row.split("|")[2:-1] if cell.strip()] == cells, result.name


def less(found: Comparison) -> list[str]:
    """["baseline, rl_kernel", "share less (95 % interval)"], as a person writes them; of memory no interval."""
    means = [f"{side.mean:#.3g}".rstrip(".") for side in found.sides.values() if side is not None]
    d = found.difference
    assert d is not None
    interval = "" if d.low is None or d.high is None else f" ({-100 * d.high:.1f} to {-100 * d.low:.1f})"
    return [", ".join(means), f"{-100 * d.value:.1f}%{interval if found.metric.unit == 's' else ''}"]


def test_every_file_stands_with_its_commands():
    text = (ROOT / PAGE).read_text()
    files = sorted((ROOT / RESULTS).glob("*.json"))
    assert len(files) >= 10
    for file in files:
        found = list(commands_of(json.loads(file.read_text())))
        assert found, f"{file.name} must say the command that made it"
        assert f"File: [{RESULTS / file.name}](../{RESULTS / file.name})" in text
        assert [command for command in found if command not in text] == []
    records = sorted((ROOT / RESULTS).glob("*/bench.json"))
    assert len(records) >= 4
    for file in records:
        part = text[text.index(f"### {file.parent.name.replace('_', ' ')}\n") :]
        assert json.loads(file.read_text())["command"] in part
        assert f"File: [{file.relative_to(ROOT)}](../{file.relative_to(ROOT)})" in part


def test_claims_of_the_tiers_stand_apart():
    text = (ROOT / PAGE).read_text()
    operators = text[text.index("## Operators") : text.index("## A trainer alone")]
    alone = text[text.index("## A trainer alone") : text.index("## Full steps")]
    assert "Nothing here says how much faster a training step is." in operators
    assert "training_qwen3_4b" not in operators and "| `linear_logp`" not in alone
    assert "![Q4B-16k: time of a call](images/operators-h200-Q4B-16k.png)" in operators
    assert "there is **no interval**" in operators, "the file was measured before calls were kept"


def test_a_case_is_told_before_it_is_used():
    text = (ROOT / PAGE).read_text()
    operators = text[text.index("## Operators") : text.index("## A trainer alone")]
    for case in ("T1", "Q4B-16k", "Q8B-8k"):
        line = next(line for line in operators.splitlines() if case in line)
        assert line.startswith(f"| {case} | "), line
    titles = re.findall("^#### (.*)", operators, re.M)
    assert titles[:3] == ["Cases", "Operators of these cases", "Operators that move bytes"]
    assert operators.index("![Q4B-16k") < operators.index("#### Operators that move bytes")


def test_a_changed_number_makes_page_and_picture_stale(copy: Path):
    drawn = published.pictures(read_results(copy))
    assert drawn and len(stale(copy, read_results(copy))) == 1 + len(drawn)
    write(copy, read_results(copy))
    assert stale(copy, read_results(copy)) == []
    assert (copy / PAGE).read_text() == (ROOT / PAGE).read_text()

    file = copy / RESULTS / "operators_h200.json"
    content = json.loads(file.read_text())
    row = next(row for row in content["linear"][4]["rows"] if row["name"] == "native")
    row["ms"] |= {"median": 50.0, "min": 49.0, "max": 51.0}
    file.write_text(json.dumps(content))
    picture = IMAGES / "operators-h200-Q4B-16k.png"
    assert stale(copy, read_results(copy)) == [
        f"{PAGE} is not what {RESULTS} say",
        f"{picture} was not drawn from its file as it is",
    ]
    write(copy, read_results(copy))
    assert stale(copy, read_results(copy)) == []
    (copy / picture).unlink()
    assert stale(copy, read_results(copy)) == [f"{picture} was not drawn from its file as it is"]


def test_a_record_is_told_in_a_line_drawn_and_folded(tmp_path: Path):
    folder = tmp_path / RESULTS / "e2e_glm_h200"
    folder.mkdir(parents=True)
    replace(full_steps(repeats=3, steps=6), experts=128, notes=["another run on the next GPU"]).write(folder)
    write(tmp_path, read_results(tmp_path))
    text = (tmp_path / PAGE).read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("| [full steps](#e2e-glm-h200): "))
    memory, _, step = line.strip("| ").split(" | ")[1:]
    assert re.fullmatch(r"71 to 65.3 GiB, \*\*-8.0 %\*\*", memory) and " s, " in step
    part = text[text.index("### e2e glm h200") :]
    assert (
        MOE_LIMIT in part[: part.index("**Hardware**")] and "- **Note** another run on the next GPU" in part
    )
    for name in ("differences", "time_breakdown"):
        picture = f"e2e-glm-h200-{name.replace('_', '-')}.png"
        assert f"](images/{picture})" in part and (tmp_path / IMAGES / picture).is_file()
    assert stale(tmp_path, read_results(tmp_path)) == []
    assert part.index("<details>") < part.index("#### Time") < part.index("</details>")


def test_a_missed_figure_is_said_first(copy: Path):
    before = re.search(r"runs\*\* (\d+) met, \*\*(\d+) missed", page(read_results(copy)))
    assert before is not None
    file = copy / RESULTS / "offload_qwen3_4b_h200.json"
    content = json.loads(file.read_text())
    content["figures"]["offload_s"] = 9.0
    file.write_text(json.dumps(content))
    lines = page(read_results(copy)).splitlines()
    told = next(line for line in lines if line.startswith("- **Targets of runs**"))
    assert (
        f"{int(before[1]) - 1} met, **{int(before[2]) + 1} missed**" in told
        and "trainer's state out and back 9 s (at most 6, missed by 50%)" in told
    )
    table = [line for line in lines if line.startswith("| ") and "[offload" in line]
    assert "**missed by 50%**" in table[0]
    assert lines.index(table[0]) < next(
        i for i, line in enumerate(lines) if line.endswith("colocated_qwen3_4b_h200.json) |")
    )


def test_records_of_runs_are_published_where_their_tier_belongs(tmp_path: Path):
    folder = tmp_path / RESULTS / "grpo_both_sides"
    folder.mkdir(parents=True)
    record = full_steps(repeats=3, steps=6)
    record.write(folder)
    text = page(read_results(tmp_path))
    section = text[text.index("## Full steps\n\nWhole steps: rollout, training and weight transfer.\n") :]
    assert (
        section.index("<summary>How to read")
        < section.index("### grpo both sides")
        < section.index("p50 from")
    )
    assert record.command in text and "95 % interval" in text
    assert "| [full steps](#grpo-both-sides): " in text and "#### Fallbacks" in text

    def unmeasured() -> list[str]:
        return re.findall(r"^- \*\*Not measured\*\*.*", page(read_results(tmp_path)), re.M)[0].split("; ")[
            -2:
        ]

    full, alone = unmeasured()
    assert (
        "full steps of" in full and "alone (`vime bench module`)" in alone and "tiny-cpu" not in full + alone
    )
    assert "qwen3-4b-gsm8k" in full and "qwen3-4b-gsm8k" in alone
    beside = folder.parent / "grpo_rlk_fast"
    beside.mkdir()
    other = deepcopy(replace(record, name="qwen3-4b-gsm8k", preset="smoke"))
    other.write(folder)
    assert (
        "- **Mind** Measured by `rlk_fast`, not by `rl_kernel_ops` as the file has it today: to repeat this"
        in page(read_results(tmp_path))
    )
    assert "as the file has it today" not in text, "of a record that no file of the examples is of"
    assert "qwen3-4b-gsm8k (but for smoke by `rlk_fast`, not by `rl_kernel_ops` as" in unmeasured()[0]
    today = read_settings(EXAMPLES / "qwen3-4b-gsm8k.yaml", "smoke").switch
    values = {side: getattr(today, side).split(",") for side in SIDES}
    for side, repeats in record.sides.items():
        for repeat in repeats:
            repeat.config["kernels"] = {"rl_kernel_ops": values[side]}
    record = replace(record, name="qwen3-4b-gsm8k", switch={"field": "rl_kernel_ops", **values})
    replace(record, preset="smoke").write(folder)
    assert "qwen3-4b-gsm8k (but for smoke)" in unmeasured()[0]
    other.write(beside)
    assert "qwen3-4b-gsm8k (but for smoke)" in unmeasured()[0], "measured as the file says, and otherwise too"
    record.write(folder)
    assert "qwen3-4b-gsm8k" not in unmeasured()[0] and "qwen3-4b-gsm8k" in unmeasured()[1]


def test_a_file_of_no_known_kind_is_told_in_full(tmp_path: Path):
    (tmp_path / RESULTS).mkdir(parents=True)
    content = {
        "what": "Some speed",
        "command": "make fast",
        "date": "2026-11-22",
        "commit": "abc",
        "parts": [{"name": "first", "tokens_per_s": 7.0}, {"command": "make faster", "tokens_per_s": 8.5}],
        "seconds": [1.0, 2.5],
    }
    (tmp_path / RESULTS / "new_b200.json").write_text(json.dumps(content))
    text = page(read_results(tmp_path))
    assert "## Others" in text and "### new b200\n\nSome speed." in text
    assert "- **Hardware** not noted" in text and "- **Commit** abc" in text
    assert "#### first\n\n- tokens per s: 7 tokens/s" in text and "#### parts 2 of 2\n" in text
    assert (
        "```bash\nmake faster\n```\n\n- tokens per s: 8.5 tokens/s" in text and "- seconds: 1, 2.5 s" in text
    )
    assert "**Not measured**" in text and "LM head and loss" not in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", r"benchmarks/results/a\.json must be JSON"),
        ("a.json", "[1]", r"benchmarks/results/a\.json must hold a JSON object, got list"),
        ("a.json", '{"figures": {"speed": 1}}', r"figures of a\.json must be of .* got speed"),
        ("a.json", '{"linear": [], "elementwise": null}', r"benchmarks/results/a\.json must be of schema 1"),
        ("a/bench.json", '{"schema": 0}', "bench.json must be of schema 2"),
    ],
)
def test_what_is_no_result_is_named(tmp_path: Path, name: str, text: str, message: str):
    path = tmp_path / RESULTS / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        page(read_results(tmp_path))


def test_the_command_checks_and_writes(copy: Path, monkeypatch, capsys):
    monkeypatch.setattr(published, "ROOT", copy)
    assert published.main(["--check"]) == 1
    assert f"run {COMMAND}" in capsys.readouterr().out
    assert published.main([]) == 0
    drawn = published.pictures(read_results(copy))
    assert capsys.readouterr().out.split() == [str(PAGE), *map(str, drawn)]
    assert published.main(["--check"]) == 0
    (copy / RESULTS / "broken.json").write_text("{")
    assert published.main([]) == 2
    assert "broken.json must be JSON" in capsys.readouterr().err
