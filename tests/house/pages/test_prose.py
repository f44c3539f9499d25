"""Counts habits in docstrings, comments and pages that make a sentence hard to read, and holds their shares.

CONTRIBUTING.md (English) says how to write instead. A pattern marks a sentence for a second look, so a small share of
marked sentences is right.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from house_tree import ROOT

BARS = {
    "a pronoun after 'of' (of it, of each): write the noun": (
        r"\bof (?:it|each|all|one|them|both|th[eo]se|others?|which|whose|that)[\s,.;:)]",
        2.0,
    ),
    "'Of' at the beginning: begin with the subject": (r"^Of\s", 0.05),
    "a question without a question mark: write a sentence or a noun": (
        r"^(?:What|Which|Where|How|Whether|Whose)\b[^?]*\.$",
        0.6,
    ),
    "code that talks: it returns, reports, raises or stores": (
        r"\b(?:says?|said|tells?|told|hears?|heard|knows?|knew|gives? (?:it|its|them))\b",
        0.5,
    ),
    "'what is' as a noun: name the thing": (r"\bwhat (?:is|was|must|may|can|it|they|a|the|an|no)\b", 0.5),
    "beside, apart, of its own": (
        r"\b(?:besides?|apart|by itself|by themselves|of its own|of their own)\b",
        0.3,
    ),
    "'place' for an index, slot, view or offset": (r"\bplaces?\b", 0.7),
}
"""Habit -> its pattern, and the largest share of sentences in percent. Nearby projects in this field have 0 to 1.5."""
_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*])")


def texts_of_code(source: str) -> Iterator[str]:
    """The string statements and the comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            yield value if isinstance(value, str) else ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#! ")


def texts_of_page(source: str) -> Iterator[str]:
    """The paragraphs of a Markdown page, without code blocks, tables, headings and HTML."""
    prose = re.sub(r"^ *```.*?^ *```", "", source, flags=re.S | re.M)
    lines = ["" if line.lstrip().startswith(("|", "#", "!", "<")) else line for line in prose.splitlines()]
    yield from "\n".join(lines).split("\n\n")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text with at least three words."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in _END.split(" ".join(paragraph.split())):
            if len(sentence.split()) > 2 and re.search(r"[a-z]{2}", sentence):
                yield sentence


def prose_files() -> Iterator[Path]:
    folders = ("rl_kernel", "slime", "vime", "scripts", "examples", "tests", "benchmarks", "docs", "docker")
    for folder in folders:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md"))
    yield from ROOT.glob("*.md")


def test_sentences_are_plain() -> None:
    count, found = 0, Counter[str]()
    where: dict[str, Counter[str]] = {habit: Counter() for habit in BARS}
    for path in prose_files():
        source = path.read_text(encoding="utf-8")
        for text in texts_of_code(source) if path.suffix == ".py" else texts_of_page(source):
            for sentence in sentences(text):
                count += 1
                for habit, (pattern, _) in BARS.items():
                    if re.search(pattern, sentence):
                        found[habit] += 1
                        where[habit][str(path.relative_to(ROOT))] += 1
    over = {
        f"{habit}: {100 * found[habit] / count:.2f}% of the sentences, at most {bar}%": where[
            habit
        ].most_common(5)
        for habit, (_, bar) in BARS.items()
        if 100 * found[habit] / count > bar
    }
    assert count > 15_000
    assert not over, json.dumps(over, indent=1)


def test_habits_are_found() -> None:
    """Each pattern finds its habit, and plain sentences have none."""
    examples = {
        "Returns the size of each.": 0,
        "Of the newest engine.": 1,
        "How many tokens a rank sends.": 2,
        "The server tells the version.": 3,
        "Stores what the engine returned as a record, and what is left.": 4,
        "A folder beside the checkpoint.": 5,
        "The place of the token in the response.": 6,
    }
    habits = [pattern for pattern, _ in BARS.values()]
    for text, index in examples.items():
        (sentence,) = sentences(text)
        assert [bool(re.search(pattern, sentence)) for pattern in habits] == [i == index for i in range(7)], (
            text
        )
    plain = "Registers the server with the router once its weights are loaded."
    assert not any(re.search(pattern, plain) for pattern in habits)
    assert list(texts_of_page("# Title\n\nOne text.\n```\ncode of it\n```\n")) != ["code of it"]
