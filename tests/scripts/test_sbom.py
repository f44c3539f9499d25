"""The bills of materials of the lock files are complete and up to date, and have the licences of the packages'
metadata."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution
from pathlib import Path

import lock
import pytest
import sbom


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_bill_has_every_package_of_its_lock(name: str) -> None:
    written = sbom.path_of(name).read_text(encoding="utf-8")
    assert written == sbom.text(name), "run python scripts/sbom.py"
    bill = json.loads(written)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])
    pins = lock.read(lock.FOLDER / f"{name}.txt")
    found = {(c["name"], c["version"]): {h["content"] for h in c["hashes"]} for c in bill["components"]}
    assert found == {(package.split()[0], version): hashes for package, (version, hashes) in pins.items()}
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(set(references)) == len(references)
    for component in bill["components"]:
        assert component["purl"] == f"pkg:pypi/{component['name']}@{component['version']}"


@pytest.mark.parametrize("name", ["cpu-amd64", "cpu-arm64"])
def test_every_package_without_a_gpu_has_a_licence(name: str) -> None:
    bill = json.loads(sbom.path_of(name).read_text(encoding="utf-8"))
    named = {c["name"]: next(iter(c["licenses"][0].values())) for c in bill["components"]}
    assert named["aiohttp"] == "Apache-2.0 AND MIT" and named["tqdm"] == "MPL-2.0 AND MIT"
    assert named["transformers"] == {"id": "Apache-2.0"} and named["setuptools"] == {"id": "MIT"}
    closed = {package for package, licence in named.items() if "Intel End User" in str(licence)}
    assert closed == ({"intel-openmp", "intel-cmplr-lib-ur"} if name == "cpu-amd64" else set())


def test_cpu_locks_accept_the_cpu_builds_of_torch() -> None:
    """setup.sh and the image install torch from the lock with --require-hashes."""
    for name in ("cpu-amd64", "cpu-arm64"):
        _, hashes = lock.read(lock.FOLDER / f"{name}.txt")["torch"]
        assert len(lock.LOCKS[name].torch) == len(lock.LOCKS[name].pythons)
        assert set(lock.LOCKS[name].torch) < hashes


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        ("License-Expression: MIT OR Apache-2.0\nLicense: other", "MIT OR Apache-2.0"),
        ("License: Apache License, Version 2.0", "Apache-2.0"),
        ("License: MIT License\n        \n        Copyright (c) 2022", "MIT"),
        (
            "License: Copyright (c)\n        All rights\nClassifier: License :: OSI Approved :: BSD License",
            "BSD License",
        ),
        ("Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: ISC License", "MIT OR ISC"),
        ("Summary: nothing", "MIT"),  # the package has a licence file
    ],
)  # fmt: skip
def test_licence_of_a_packages_metadata(tmp_path: Path, lines: str, licence: str) -> None:
    folder = tmp_path / "tiny-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: tiny\nVersion: 1\n{lines}\n")
    (folder / "LICENSE").write_text("Permission is hereby granted, free of charge, to any person")
    (folder / "RECORD").write_text("tiny-1.dist-info/LICENSE,,\n")
    assert sbom.licence_of(Distribution.at(folder)) == licence
