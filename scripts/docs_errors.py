"""`python scripts/docs_errors.py`: docs/troubleshooting.md, written from the errors that the code raises.

The messages of configuration, start-up and engines are read from the source code. A message of this project has the
form "<name> must <rule>, got <value>; <what to do>", so most rows need no other text. docs/troubleshooting.yaml has the
introduction of the page, and a remedy for each message without one. Its key is a constant part of the message. A test
fails if the page is out of date, or if a message has no remedy.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTES = Path("docs/troubleshooting.md"), Path("docs/troubleshooting.yaml")
COMMAND = "python scripts/docs_errors.py"
HOLE = "…"
"""Replaces a value in a message."""

AREAS = {
    "Flags and configuration": (
        "slime/config",
        "slime/algo/estimators",
        "slime/algo/losses.py",
        "slime/algo/policy_loss.py",
        "slime/operators.py",
        "slime/hooks.py",
        "vime/plan.py",
        "vime/cli.py",
    ),
    "Checkpoints": (
        "slime/hf_config.py",
        "slime/checkpoint_dir.py",
        "slime/checkpoint_files.py",
        "slime/megatron_backend/checkpoint_io.py",
        "slime/models",
        "slime/room.py",
        "vime/checkpoint.py",
    ),
    "Prompt files and training data": ("slime/data",),
    "Flags of vLLM, the router and SGLang": (
        "vime/engine/flags.py",
        "vime/engine/fp8.py",
        "vime/engine/backend.py",
        "vime/engine/sglang_flags.py",
        "vime/engine/sglang_config.py",
        "vime/engine/apart.py",
        "vime/serve.py",
    ),
    "Start-up: Ray, GPUs and nodes": ("slime/cluster", "vime/train.py"),
    "Engines and weight transfer": ("vime/engine", "slime/weight_sync"),
}
"""Section of the page -> files and folders. A file belongs to the first section that names the file or its folder."""


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


def source_files() -> Iterator[tuple[str, Path]]:
    """(section, file) for every file of AREAS, once each. Files that AREAS names come before folders."""
    exact = {path for paths in AREAS.values() for path in paths if path.endswith(".py")}
    for section, paths in AREAS.items():
        for path in paths:
            found = [ROOT / path] if path in exact else sorted((ROOT / path).rglob("*.py"))
            for file in found:
                name = str(file.relative_to(ROOT))
                if path in exact or name not in exact:
                    yield section, file


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
        if text and text.strip(HOLE + " "):
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


def collected() -> dict[str, list[Message]]:
    """Section -> its messages, each text once."""
    sections: dict[str, list[Message]] = {section: [] for section in AREAS}
    seen: set[str] = set()
    for section, file in source_files():
        for message in messages_of(file):
            if message.text not in seen:
                seen.add(message.text)
                sections[section].append(message)
    return sections


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
    own = message.remedy
    if re.match(r"(?!vLLM)[a-zA-Z]+\b(?![-_./])", own):
        own = own[0].upper() + own[1:]
    own = f"{own}." if own else ""
    return note_of(message, written) or own


def without_remedy() -> list[str]:
    """Messages without a remedy and without a note."""
    written = notes()
    return [f"{m.path}: {m.text}" for ms in collected().values() for m in ms if not remedy_of(m, written)]


def unused_notes() -> list[str]:
    """Notes without a message."""
    messages = [m for ms in collected().values() for m in ms]
    return [key for key in notes() if not any(fits(key, message) for message in messages)]


def cell(text: str, *, code: bool = False) -> str:
    """Text as the content of a table cell. A message in code keeps its characters, so that readers can search for
    it."""
    text = text.replace("\n", " ")
    if code:
        return f"`{text.replace('`', chr(39)).replace('|', '/')}`"
    pieces = re.split(r"(`[^`]*`)", text)  # odd entries are code and stay unchanged
    for place in range(0, len(pieces), 2):
        plain = re.sub(r"([|*])", r"\\\1", pieces[place]).replace("<", "&lt;").replace(">", "&gt;")
        pieces[place] = re.sub(r"(?<![\w-])--[a-z][\w-]*\w", lambda flag: f"`{flag[0]}`", plain)
    return "".join(pieces)


def page() -> str:
    """The whole page."""
    written = notes()
    lines = [yaml.safe_load((ROOT / NOTES).read_text(encoding="utf-8"))["introduction"].rstrip()]
    for section, messages in collected().items():
        lines += ["", f"## {section}", "", "| Message | Cause and remedy |", "| --- | --- |"]
        for message in sorted(messages, key=lambda m: m.text.lstrip(HOLE + " -'").lower()):
            lines.append(f"| {cell(message.rule, code=True)} | {cell(remedy_of(message, written))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if missing := without_remedy():
        sys.exit(
            f"{NOTES} must say what to do about each message that does not, got none for:\n"
            + "\n".join(missing)
        )
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
