"""Copies the files of templates/KIND to a new folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime.config.near_names import nearest
from slime.records.errors import FlagError

KINDS = {
    "reward": "a reward function and its test",
    "agent": "an agent with a tool, its reward and their test",
    "project": "flags, prompts, a reward and a script that trains, and their test",
}
TEMPLATES = Path(__file__).parent / "templates"
_SUFFIX = ".txt"
"""Suffix that each file of a template has in addition, so that no tool takes it for a file of this package."""
USAGE = "\n".join(
    ["usage: vime new KIND DIR", "", *(f"  vime new {name:<8} DIR   {what}" for name, what in KINDS.items())]
)


def main(argv: Sequence[str]) -> int:
    """Writes the files. Raises ValueError for another kind, and for a folder that has files."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    kind = argv[0]
    if kind not in KINDS:
        raise FlagError(
            "KIND", f"be one of {', '.join(KINDS)}", kind, f"see vime new --help{nearest(kind, KINDS)}"
        )
    if len(argv) != 2:
        raise FlagError(
            f"vime new {kind}", "be followed by one folder", " ".join(argv[1:]) or "none", "give DIR"
        )
    folder = Path(argv[1])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FlagError("DIR", "be a new or an empty folder", folder, "give another name")
    files = sorted((TEMPLATES / kind).iterdir())
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        text = file.read_text(encoding="utf-8").replace("@DIR@", str(folder))
        (folder / file.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
    print(f"{folder}: {', '.join(file.name.removesuffix(_SUFFIX) for file in files)}")
    print(f"next: pytest {folder}")
    return 0
