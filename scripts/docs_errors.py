"""`python scripts/docs_errors.py`: vime/messages.json, every message of the code with its remedy, for `vime explain`.

A message of this project has the form "<name> must <rule>, got <value>; <what to do>", so most need no other text.
docs/troubleshooting.yaml has a remedy for each message without one. Its key is a constant part of the message. A test
fails if the file is out of date, or if a message has no remedy. The symptoms of docs/troubleshooting.md, which other
libraries print, are in the same file.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTES = Path("vime/messages.json"), Path("docs/troubleshooting.yaml")
SYMPTOMS = Path("docs/troubleshooting.md")
COMMAND = "python scripts/docs_errors.py"
HOLE = "…"
"""Replaces a value in a message."""

PACKAGES = ("slime", "vime", "rl_kernel")


@dataclass(frozen=True)
class Message:
    """One error text (constant parts joined by HOLE), and the file that raises it."""

    text: str
    path: Path

    @property
    def rule(self) -> str:
        """The error text without its remedy."""
        return self._parts()[0]

    @property
    def remedy(self) -> str:
        """The remedy in the message itself, or an empty string."""
        return self._parts()[1]

    def _parts(self) -> tuple[str, str]:
        before, found, after = self.text.rpartition("; ")
        says_what = found and " must" in before and re.search("[a-z]{3}", after)
        return (before, after) if says_what else (self.text, "")


def text_of(node: ast.expr, constants: dict[str, str]) -> str | None:
    """The text of a string expression, with HOLE for values. None for other expressions. `constants` are the string
    constants at the top of the file."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (
            part.value if isinstance(part, ast.Constant) else constants.get(ast.unparse(part.value), HOLE)
            for part in node.values
        )
        return re.sub(rf"{HOLE}+", HOLE, "".join(map(str, parts)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left, constants), text_of(node.right, constants)
        return None if left is None and right is None else f"{left or HOLE}{right or HOLE}"
    return None


def messages_of(path: Path) -> list[Message]:
    """Texts that a file raises as ValueError, RuntimeError or similar errors, and texts "... must ..., got ...".

    The second rule finds messages that another function raises.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    inner = {
        id(v)
        for n in ast.walk(tree)
        if isinstance(n, ast.JoinedStr | ast.BinOp)
        for v in ast.iter_child_nodes(n)
    }
    found: dict[str, Message] = {}
    for node in ast.walk(tree):
        raised = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and bool(node.exc.args)
        if raised and raises_to_the_user(node.exc):
            text = text_of(node.exc.args[0], constants)
        elif isinstance(node, ast.expr) and id(node) not in docs | inner:
            text = text_of(node, constants)
            text = text if text and re.search(r" must .*, got ", text, re.S) else None
        else:
            continue
        if text and text.strip(HOLE + " :;,.()"):
            found.setdefault(text, Message(" ".join(text.split()), path.relative_to(ROOT)))
    return list(found.values())


def raises_to_the_user(call: ast.Call) -> bool:
    """Whether a raised call is an error for the user. AttributeError and similar errors show a bug."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name.endswith("Error") and name not in (
        "AttributeError",
        "NotImplementedError",
        "KeyError",
        "TypeError",
    )


@cache
def collected() -> tuple[Message, ...]:
    """All messages, each text once."""
    found: dict[str, Message] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for message in messages_of(file):
                found.setdefault(message.text, message)
    return tuple(found.values())


def notes() -> dict[str, str]:
    """Constant text of a message -> handwritten cause and remedy."""
    return yaml.safe_load((ROOT / NOTES).read_text(encoding="utf-8"))["remedies"]


def note_of(message: Message, written: dict[str, str]) -> str:
    """The handwritten text of a message, from the longest key that fits."""
    return written.get(max((k for k in written if fits(k, message)), key=len, default=""), "")


def fits(key: str, message: Message) -> bool:
    """Whether a message contains a key. A key that begins with a value must be at the start of the message."""
    return message.text.startswith(key) if key.startswith(HOLE) else key in message.text


def remedy_of(message: Message, written: dict[str, str]) -> str:
    """The remedy: the handwritten text, or else the remedy in the message."""
    own = message.remedy.removeprefix("or ")
    if re.match(r"(?!vLLM)[a-zA-Z]+\b(?![-_./])", own):
        own = own[0].upper() + own[1:]
    own = f"{own}." if own else ""
    return note_of(message, written) or own


def without_remedy() -> list[str]:
    """Messages without a remedy and without a note."""
    written = notes()
    return [f"{m.path}: {m.text}" for m in collected() if not remedy_of(m, written)]


def unused_notes() -> list[str]:
    """Notes without a message."""
    return [key for key in notes() if not any(fits(key, message) for message in collected())]


def plain(text: str) -> str:
    """Markdown as the text of a terminal: a link to a page becomes the page's path."""
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)?([\w./-]+)[^)]*\)", r"\1 (\2)", text).replace("`", "")
    return re.sub(r"\((\w[\w-]*\.md)\)", r"(docs/\1)", text)


def symptoms() -> list[list[object]]:
    """The rows of the tables of SYMPTOMS whose first column is a symptom: [symptom, remedy, page, its quoted parts]."""
    rows: list[list[object]] = []
    in_table = False
    for line in (ROOT / SYMPTOMS).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            in_table = False
        elif cells[0] == "Symptom":
            in_table = True
        elif in_table and set(cells[0]) - set("-: "):
            quoted = [part for part in re.findall(r"`([^`]+)`", cells[0]) if not part.startswith("--")]
            rows.append([plain(cells[0]), plain(" ".join(cells[1:])), str(SYMPTOMS), quoted])
    return rows


def page() -> str:
    """The whole file: one line per message or symptom, in the order of the text."""
    written = notes()
    messages: list[list[object]] = [
        [" ".join(m.rule.split()), plain(remedy_of(m, written)), str(m.path)] for m in collected()
    ]
    rows = sorted(
        [*messages, *symptoms()],
        key=lambda row: (str(row[0]).lstrip(HOLE + " -'").lower(), str(row)),
    )
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


if __name__ == "__main__":
    if missing := without_remedy():
        sys.exit(
            f"{NOTES} must say what to do about each message that does not, got none for:\n"
            + "\n".join(missing)
        )
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
