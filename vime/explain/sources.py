"""Reads every error message of the code with its remedy, and the symptoms of docs/troubleshooting.md.

`python vime/explain/sources.py FOLDER` writes them to vime/messages.json in FOLDER. setup.py calls it for a wheel. This
module imports the standard library only, because the build has no other package.

A message of this project has the form "<name> must <rule>, got <value>; <what to do>", so most need no other text.
docs/troubleshooting.toml has a remedy for each message without one. Its key is a constant part of the message.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path("vime/messages.json")
NOTES, SYMPTOMS = Path("docs/troubleshooting.toml"), Path("docs/troubleshooting.md")
PACKAGES = ("slime", "vime", "rl_kernel")
HOLE = "…"
"""Replaces a value in a message."""

_RULE = re.compile(r" must .*, got\s", re.S)
_WITHOUT_TEXT = (
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.Name,
    ast.Pass,
    ast.alias,
)
_WITH_FIELDS = ("FlagError", "StatedError", "UnknownFlag")
"""The errors whose text is built from their arguments (`slime/records/errors.py`)."""
_BUGS = ("AttributeError", "NotImplementedError", "KeyError", "TypeError")
"""Errors that are not for the user."""


@dataclass(frozen=True)
class Message:
    """One error text (constant parts joined by HOLE), and the file that raises it."""

    text: str
    path: Path

    @property
    def rule(self) -> str:
        """Returns the error text without its remedy."""
        return self._parts()[0]

    @property
    def remedy(self) -> str:
        """Returns the remedy in the message itself, or an empty string."""
        return self._parts()[1]

    def _parts(self) -> tuple[str, str]:
        before, found, after = self.text.rpartition("; ")
        has_remedy = found and " must" in before and re.search("[a-z]{3}", after)
        return (before, after) if has_remedy else (self.text, "")


def expression_text(node: ast.AST, constants: dict[str, str]) -> str | None:
    """Returns the text of a string expression, with HOLE for values, or None for other expressions. `constants` are the
    string constants at the top of the file."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (
            part.value if isinstance(part, ast.Constant) else constants.get(_name(part), HOLE)
            for part in node.values
        )
        return re.sub(rf"{HOLE}+", HOLE, "".join(map(str, parts)))
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _WITH_FIELDS:
        return _join_fields(node, constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = expression_text(node.left, constants), expression_text(node.right, constants)
        return None if left is None and right is None else f"{left or HOLE}{right or HOLE}"
    return None


def _join_fields(call: ast.Call, constants: dict[str, str]) -> str:
    """Returns the text of an error that has fields, as its class builds it."""
    arguments = dict(zip(("flag", "rule", "got", "advice"), call.args, strict=False))
    arguments |= {str(keyword.arg): keyword.value for keyword in call.keywords}
    fields = {name: expression_text(node, constants) or HOLE for name, node in arguments.items()}
    name = getattr(call.func, "id", "")
    if name == "UnknownFlag":
        return re.sub(
            rf"{HOLE}+", HOLE, f"{fields['flag']} is not {fields['rule']}{fields.get('advice', '')}"
        )
    must = "" if name == "StatedError" else "must "
    got = f", got {fields['got']}" if "got" in fields else ""
    advice = f"; {fields['advice']}" if "advice" in fields else ""
    return f"{fields['flag']} {must}{fields['rule']}{got}{advice}"


def _name(part: ast.expr) -> str:
    """Returns the variable of an f-string's value, or an empty string for another expression."""
    value = part.value if isinstance(part, ast.FormattedValue) else None
    return value.id if isinstance(value, ast.Name) else ""


def find_messages(path: Path, root: Path = ROOT) -> list[Message]:
    """Returns texts that a file raises as ValueError, RuntimeError or similar errors, and texts "... must ..., got
    ...".

    The second rule finds messages that another function raises.
    """
    source = path.read_text(encoding="utf-8")
    if not any(part in source for part in ("raise", " must ", *_WITH_FIELDS)):
        return []
    tree = ast.parse(source)
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    texts = dict.fromkeys(_texts(tree, constants))
    return [Message(" ".join(t.split()), path.relative_to(root)) for t in texts if t.strip(HOLE + " :;,.()")]


def _texts(tree: ast.Module, constants: dict[str, str]) -> Iterator[str]:
    """Yields the texts of a module's messages, from one pass over its tree."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside_text = waiting.pop()
        inside = isinstance(node, ast.JoinedStr | ast.BinOp)
        if isinstance(node, ast.Raise):
            if isinstance(node.exc, ast.Call) and node.exc.args and raises_to_the_user(node.exc):
                with_fields = getattr(node.exc.func, "id", "") in _WITH_FIELDS
                yield expression_text(node.exc if with_fields else node.exc.args[0], constants) or ""
        elif not inside_text and (inside or isinstance(node, ast.Constant | ast.Call)):
            text = expression_text(node, constants)
            if text and _RULE.search(text):
                yield text
        # An expression that stands alone is a docstring, or a call whose arguments may be texts.
        inside = inside or isinstance(node, ast.Expr)
        for name in node._fields:
            value = getattr(node, name)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, _WITHOUT_TEXT):
                    waiting.append((child, inside))


def raises_to_the_user(call: ast.Call) -> bool:
    """Returns True if a raised call is an error for the user. AttributeError and similar errors show a bug."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name in _WITH_FIELDS or (name.endswith("Error") and name not in _BUGS)


def files(root: Path = ROOT, folders: tuple[str, ...] = PACKAGES) -> list[Path]:
    """Returns the Python files of the packages, in a fixed order."""
    return [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]


def collected(root: Path = ROOT, folders: tuple[str, ...] = PACKAGES) -> tuple[Message, ...]:
    """Returns all messages, each text once."""
    found: dict[str, Message] = {}
    for file in files(root, folders):
        for message in find_messages(file, root):
            found.setdefault(message.text, message)
    return tuple(found.values())


def notes(root: Path = ROOT) -> dict[str, str]:
    """Returns constant text of a message -> handwritten cause and remedy."""
    return tomllib.loads((root / NOTES).read_text(encoding="utf-8"))


def find_note(message: Message, written: dict[str, str]) -> str:
    """Returns the handwritten text of a message, from the longest key that fits."""
    return written.get(max((k for k in written if fits(k, message)), key=len, default=""), "")


def fits(key: str, message: Message) -> bool:
    """Returns True if a message contains a key. A key that begins with a value must be at the start of the message."""
    return message.text.startswith(key) if key.startswith(HOLE) else key in message.text


def find_remedy(message: Message, written: dict[str, str]) -> str:
    """Returns the remedy: the handwritten text, or else the remedy in the message."""
    own = message.remedy.removeprefix("or ")
    if re.match(r"(?!vLLM)[a-zA-Z]+\b(?![-_./])", own):
        own = own[0].upper() + own[1:]
    own = f"{own}." if own else ""
    return find_note(message, written) or own


def plain(text: str) -> str:
    """Converts Markdown to text for a terminal: a link to a page becomes the page's path."""
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)?([\w./-]+)[^)]*\)", r"\1 (\2)", text).replace("`", "")
    return re.sub(r"\((\w[\w-]*\.md)\)", r"(docs/\1)", text)


def symptoms(root: Path = ROOT) -> list[list[object]]:
    """Returns the rows of the tables of SYMPTOMS whose first column is a symptom: [symptom, remedy, page, its quoted
    parts]."""
    rows: list[list[object]] = []
    in_table = False
    for line in (root / SYMPTOMS).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            in_table = False
        elif cells[0] == "Symptom":
            in_table = True
        elif in_table and set(cells[0]) - set("-: "):
            quoted = [part for part in re.findall(r"`([^`]+)`", cells[0]) if not part.startswith("--")]
            rows.append([plain(cells[0]), plain(" ".join(cells[1:])), str(SYMPTOMS), quoted])
    return rows


def pages_exist(root: Path = ROOT) -> bool:
    """Returns True if the files with handwritten remedies exist. A wheel does not contain them."""
    return all((root / page).is_file() for page in (NOTES, SYMPTOMS))


def key(root: Path = ROOT) -> str:
    """Returns a hash of everything that `page` reads. This module is among the sources."""
    digest = hashlib.blake2b(digest_size=16)
    for file in (root / NOTES, root / SYMPTOMS, *files(root)):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def page(root: Path = ROOT) -> str:
    """Returns the file's text: the key, and one line per message or symptom, in the order of the text."""
    made_from, written = key(root), notes(root)
    messages: list[list[object]] = [
        [" ".join(m.rule.split()), plain(find_remedy(m, written)), str(m.path)] for m in collected(root)
    ]
    rows = sorted(
        [*messages, *symptoms(root)],
        key=lambda row: (str(row[0]).lstrip(HOLE + " -'").lower(), str(row)),
    )
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f'{{"key": "{made_from}", "messages": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    (Path(sys.argv[1]) / FILE).write_text(page(), encoding="utf-8")
