"""`python scripts/docs_extensions.py`: the counted table of CONTRIBUTING.md, from the registries of the code.

For each kind of extension, the table has the files of a new member: its own files, and the files that name at least
four of five members of the registry, by their module or by their name as a string. Tests and pages do not count. A
house test compares the page with the count, so a registry that needs one more file changes the page.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rl_kernel import public
from slime.algo.estimators import ESTIMATORS
from slime.algo.surrogates import SURROGATES
from slime.config.fields import spelled
from slime.environments.hubs import HUBS
from slime.models import FAMILIES
from slime.roles import ROLES
from slime.rollout.rewards import REWARDS
from slime.rules.flags import own_flags
from slime.weight_sync.registry import CHANNELS
from vime.backends import BACKENDS
from vime.commands import COMMANDS, MODULES

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("CONTRIBUTING.md")
COMMAND = "python scripts/docs_extensions.py"
BEGIN, END = "<!-- counted by scripts/docs_extensions.py -->\n", "<!-- end of the count -->\n"
PACKAGES = ("rl_kernel", "slime", "vime")
SHARE = 0.8
"""A file is changed for a new member if it names this share of the members."""


@cache
def sources() -> dict[str, str]:
    """Path -> text of the files of the packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def words() -> dict[str, set[str]]:
    """Word -> the files that have it: identifiers, flags, short strings with their quotes, and dotted names with their
    beginnings."""
    found: dict[str, set[str]] = {}
    for path, text in sources().items():
        here = {*re.findall(r'\w+|--[\w-]+|"[\w-]+"', text), *re.findall(r'"[\w-]+"|--[\w-]+', text)}
        for dotted in set(re.findall(r"\w+(?:\.\w+)+", text)):
            parts = dotted.split(".")
            here.update(".".join(parts[:size]) for size in range(2, len(parts) + 1))
        for word in here:
            found.setdefault(word, set()).add(path)
    return found


def naming(*wanted: str) -> set[str]:
    """The files that have one of the words."""
    return set().union(*(words().get(word, set()) for word in wanted))


def shared(members: Iterable[tuple[str, str]]) -> list[str]:
    """The files that a new member of a registry changes. Each member is (module or package, name)."""
    counts: Counter[str] = Counter()
    number = 0
    for module, name in members:
        own = module.replace(".", "/")
        counts.update(p for p in naming(module, f'"{name}"') if not p.startswith((f"{own}.py", f"{own}/")))
        number += 1
    return sorted(path for path, count in counts.items() if count >= SHARE * number)


def operators() -> dict[str, str]:
    """Package of an operator -> its name. A public function or class is in a package of rl_kernel/ops."""
    modules = {getattr(getattr(public, name), "__module__", "") or "" for name in public.__all__}
    found = {".".join(m.split(".")[:3]) for m in modules if m.startswith("rl_kernel.ops.")}
    return {module: module.rpartition(".")[2] for module in found}


def rows() -> list[tuple[str, str, list[str]]]:
    """(kind, its own files, the shared files) of each kind that a registry counts."""

    def modules(records: dict[str, object], folder: str) -> list[tuple[str, str]]:
        stems = {
            path.stem: f"{folder.replace('/', '.')}.{path.stem}" for path in (ROOT / folder).glob("*.py")
        }
        text = {stem: sources()[f"{folder}/{stem}.py"] for stem in stems}
        homes = {
            name: next(s for s in stems if f'"{name}"' in text[s] and s != "__init__") for name in records
        }
        return [(stems[stem], name) for name, stem in homes.items()]

    families = [
        (".".join(path.relative_to(ROOT).with_suffix("").parts), path.stem)
        for path in _files("slime/models/families")
    ]
    assert len(FAMILIES) >= len(families)
    estimators = modules(dict(ESTIMATORS), "slime/algo/estimators")
    surrogates = modules(dict(SURROGATES), "slime/algo/surrogates")
    channels = [(channel.path.partition(":")[0], name) for name, channel in CHANNELS.items()]
    folder = "one folder in `rl_kernel/ops`: reference, kernels, autograd, cases"
    modules = [(MODULES.get(name, f"vime.commands.{name}"), name) for name in COMMANDS]
    return [
        ("an advantage estimator", "one file in `slime/algo/estimators`", shared(estimators)),
        ("a policy loss", "one file in `slime/algo/surrogates`", shared(surrogates)),
        (
            "a reward",
            "one file in `slime/rollout/rewards`",
            shared((f.__module__, n) for n, f in REWARDS.items()),
        ),
        ("a model family", "one file in `slime/models/families`", shared(families)),
        (
            "a model beside the policy",
            "one file in `slime/roles`",
            shared((f"slime.roles.{r.name}", r.name) for r in ROLES),
        ),
        ("a weight channel", "one file in `slime/weight_sync`", shared(channels)),
        (
            "an environment hub",
            "one file in `slime/environments/connectors`",
            shared((f"slime.environments.connectors.{hub.file}", name) for name, hub in HUBS.items()),
        ),
        ("a rollout backend", "one package in `vime`", shared((f"vime.{n}", n) for n in BACKENDS)),
        ("an operator", folder, shared(operators().items())),
        ("a subcommand", "one module in `vime/commands`", shared(modules)),
    ]


def _files(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if path.stem != "__init__"]


def files_of_a_flag() -> float:
    """The median number of files that name a flag of this project."""
    return statistics.median(len(naming(name, spelled(name))) for name in own_flags())


def table() -> str:
    lines = ["| To add | Its own files | Files that it changes |", "| --- | --- | --- |"]
    lines += [
        f"| {kind} | {own} | {', '.join(f'`{p}`' for p in found) or 'none'} |" for kind, own, found in rows()
    ]
    lines.append(
        f"| a flag | none | its section in `slime/config/sections`, and the code that reads it: "
        f"half of the flags are named in at most {files_of_a_flag():g} files |"
    )
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page with the counted table."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
    print(PAGE)
