"""Writes requirements/locks/NAME.cdx.json, the bill of materials of an image's packages (CycloneDX 1.6).

    python scripts/sbom.py                      writes one file for each lock file
    python scripts/sbom.py --licences [DIR ...] first reads the licences of this Python's packages, and of packages that
                                                were unpacked in DIR, such as the packages for GPUs

requirements/locks/licences.json has a licence for each package whose metadata was read, and its version. The bill
marks a licence of another version. A package whose metadata was never read has no licence in the bill. The script
downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import lock

LICENCES = lock.FOLDER / "licences.json"
_SPDX = {
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
    "ISC License": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
}
"""Name of a licence in the metadata of packages -> SPDX identifier."""
_IDENTIFIERS = {*_SPDX.values(), "BSD-2-Clause", "MPL-2.0", "CC0-1.0", "Unlicense", "0BSD", "Zlib"}
_TEXTS = {"MIT": "Permission is hereby granted, free of charge", "Apache-2.0": "Apache License"}
"""SPDX identifier -> first words of the licence's text."""
_LONGEST_NAME = 80


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the bills of materials of the lock files.")
    parser.add_argument(
        "--licences",
        nargs="*",
        metavar="DIR",
        help="read licences first, also of the packages unpacked in DIR",
    )
    args = parser.parse_args(argv)
    if args.licences is not None:
        table = read_licences(known_licences(), args.licences)
        LICENCES.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in lock.LOCKS:
        bill = text(name)
        path_of(name).write_text(bill, encoding="utf-8")
        components = json.loads(bill)["components"]
        unknown = [component["name"] for component in components if "licenses" not in component]
        print(f"{name}: {len(components)} packages, {len(unknown)} without a licence: {' '.join(unknown)}")
    return 0


def path_of(name: str) -> Path:
    return lock.FOLDER / f"{name}.cdx.json"


def known_licences() -> dict[str, dict[str, str]]:
    """Returns package -> the version whose metadata was read, and its licence."""
    found: dict[str, dict[str, str]] = (
        json.loads(LICENCES.read_text(encoding="utf-8")) if LICENCES.exists() else {}
    )
    return found


def read_licences(known: dict[str, dict[str, str]], folders: list[str]) -> dict[str, dict[str, str]]:
    """Returns `known`, updated from the metadata of locked packages in this Python and in `folders`."""
    locked: dict[str, set[str]] = {}
    for name in lock.LOCKS:
        for package, (version, _) in lock.read(lock.FOLDER / f"{name}.txt").items():
            locked.setdefault(package.split()[0], set()).add(version)
    table = {name: entry for name, entry in known.items() if name in locked}
    for one in [*distributions(), *distributions(path=folders)]:
        name, licence = re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(), licence_of(one)
        version = one.version.partition("+")[0]  # torch's CPU build is 2.13.0+cpu
        if licence and version in locked.get(name, ()):
            table[name] = {"version": version, "licence": licence}
    return table


def licence_of(package: Distribution) -> str:
    """Returns the SPDX expression of a package: from its metadata, else from its short licence field, its classifiers
    or its licence file, in this order, else ""."""
    fields = package.metadata
    if fields.get("License-Expression"):
        return str(fields["License-Expression"])
    named, *more = str(fields.get("License") or "").strip().splitlines() or [""]
    if named in _SPDX or (named and not more and len(named) <= _LONGEST_NAME):
        return _SPDX.get(named, named)
    listed = [c.rpartition(" :: ")[2] for c in fields.get_all("Classifier", []) if c.startswith("License ::")]
    if listed:
        return " OR ".join(_SPDX.get(each, each) for each in listed)
    files = [path for path in package.files or () if path.name.upper().startswith(("LICENSE", "LICENCE"))]
    texts = [
        package.locate_file(path).read_text(encoding="utf-8") for path in files if ".dist-info" in str(path)
    ]
    return next((name for name, words in _TEXTS.items() if any(words in each for each in texts)), "")


def text(name: str) -> str:
    """Returns the bill of a lock file. The same lock file and licences give the same text."""
    licences = known_licences()
    pins = lock.read(lock.FOLDER / f"{name}.txt")
    components = [_component(package, *pin, licences) for package, pin in sorted(pins.items())]
    version = re.search(
        r'^version = "(.+)"$', (lock.ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M
    )
    assert version is not None
    bill: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": f"vime-{name}", "version": version[1]}},
        "components": components,
    }
    digest = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(bill, sort_keys=True))
    return json.dumps({**bill, "serialNumber": f"urn:uuid:{digest}"}, indent=1) + "\n"


def _component(
    package: str, version: str, hashes: set[str], licences: dict[str, dict[str, str]]
) -> dict[str, Any]:
    name, *marker = package.split(" ; ", maxsplit=1)
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "hashes": [{"alg": "SHA-256", "content": value} for value in sorted(hashes)],
    }
    entry = licences.get(name)
    notes = {"vime:marker": marker[0]} if marker else {}
    if entry is not None:
        component["licenses"] = [_licence(entry["licence"])]
        if entry["version"] != version:
            notes["vime:licence-of-version"] = entry["version"]
    if notes:
        component["properties"] = [{"name": key, "value": value} for key, value in notes.items()]
    return component


def _licence(named: str) -> dict[str, Any]:
    if named in _IDENTIFIERS:
        return {"license": {"id": named}}
    words = re.findall(r"[^\s()]+", named)
    if (
        len(words) > 1
        and all(word in _IDENTIFIERS for word in words[::2])
        and {*words[1::2]} <= {"AND", "OR"}
    ):
        return {"expression": named}
    return {"license": {"name": named}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
