"""Checks docker/ and shell scripts: linters, lock files, Kubernetes schemas, and each image's contents."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import lock
import pytest
import yaml
from house_tree import ROOT, files
from kuberay import SCHEMAS
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DOCKERFILE = ROOT / "docker/Dockerfile"
MANIFESTS = [path for path in files(".yaml") if path.parts[:2] == ("docker", "k8s")]
KUBERNETES = "1.34"


def lint(tool: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / tool
    command = [str(program if program.exists() else shutil.which(tool) or tool), *arguments]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True)


def test_hadolint() -> None:
    done = lint("hadolint", "--failure-threshold", "info", str(DOCKERFILE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck() -> None:
    scripts = [str(path) for path in files(".sh") if "models" not in path.parts]
    done = lint("shellcheck", "--external-sources", "--format", "gcc", *scripts, ".ci/run")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linters_find_faults() -> None:
    assert "DL3006" in lint("hadolint", "-", stdin="FROM debian\n").stdout
    assert "SC2086" in lint("shellcheck", "-", stdin="#!/bin/sh\nls $1\n").stdout


@pytest.fixture(scope="module")
def stages() -> dict[str, str]:
    """Returns stage -> its instructions, from docker/Dockerfile."""
    parts = re.split(r"^FROM \S+ AS (\S+)\n", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("image", "device"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_an_image_is_unprivileged_and_checks_its_health(stages, image: str, device: str) -> None:
    stage = stages[image]
    assert re.search(r"^USER 10001:10001$", stage, re.MULTILINE)
    assert re.search(
        rf'^HEALTHCHECK .*CMD \["vime", "doctor", "--device", "{device}"\]$', stage, re.MULTILINE
    )
    assert 'VOLUME ["/srv/vime/runs", "/var/lib/vime/huggingface", "/var/lib/vime/cache"]' in stage
    assert "HF_HOME=/var/lib/vime/huggingface" in stage
    assert f"LOCK=requirements/locks/{image}-${{TARGETARCH}}.txt" in stage
    for label in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in stage


def test_the_images_differ_in_their_device_alone(stages) -> None:
    """The Dockerfile has both final stages in full, because a stage cannot choose its base from a list of two."""

    def plain(stage: str) -> str:
        kept = [line for line in stage.splitlines() if line and not line.startswith("#")]
        return re.sub(r"cpu|gpu|cuda|CPUs|NVIDIA GPUs", "X", "\n".join(kept))

    assert plain(stages["cpu"]) == plain(stages["gpu"])


def test_the_version_of_the_image_is_the_packages() -> None:
    (packaged,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(re.findall(r"^ARG VERSION=(.+)$", DOCKERFILE.read_text(), re.MULTILINE)) == {packaged}


def requirements(name: str, python: str) -> dict[str, SpecifierSet]:
    """Returns each package with its versions, for one Python version."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    listed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = {"python_version": python}
    return {r.name: r.specifier for r in listed if r.marker is None or r.marker.evaluate(here)}


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_file_fits_its_requirements(name: str) -> None:
    """`scripts/lock.py --check` also queries the package index. This test needs no network."""
    pins, locked = lock.read(lock.FOLDER / f"{name}.txt"), lock.LOCKS[name]
    for python in locked.pythons:
        wanted = {p: v for file in locked.requirements for p, v in requirements(file, python).items()}
        wanted = {package: versions for package, versions in wanted.items() if package not in locked.without}
        marked = f' ; python_version == "{python}"'
        here = {k.removesuffix(marked): v for k, (v, _) in pins.items() if ";" not in k or k.endswith(marked)}
        for package, versions in wanted.items():
            assert here[package] in versions, f"{package}: run python scripts/lock.py"
        assert not locked.options or here.keys() == wanted.keys()  # complete files have options
    assert all(re.fullmatch("[0-9a-f]{64}", value) for _, hashes in pins.values() for value in hashes)
    assert all(hashes for _, hashes in pins.values())
    assert (lock.FOLDER / f"{name}.txt").read_text() == lock.text(name, pins)


def test_a_lock_file_that_is_out_of_date_is_found() -> None:
    locked = {"a": ("1", {"x"}), "b": ("1", {"x"}), "c": ("1", {"x", "y"}), "d": ("1", set())}
    found = {"a": ("2", {"x"}), "c": ("1", {"x"}), "d": ("1", {"x"}), "e": ("1", {"x"})}
    assert lock.compare(locked, found) == [
        "e is missing",
        "b is not needed",
        "a is 1, and resolves to 2",
        "c 1 has hashes that the index does not give",
        "d 1 has hashes that the index does not give",
    ]
    assert (
        lock.compare({"a": ("1", {"x"})}, {"a": ("1", {"x", "y"})}) == []
    )  # a new wheel of the same version


def wheel(folder: Path, processor: int) -> str:
    """Writes a wheel for arm64 with one library for that processor (e_machine of ELF) and returns its SHA-256."""
    library = b"\x7fELF".ljust(18, b"\0") + processor.to_bytes(2, "little")
    parts = {
        "tiny/library.so": library,
        "tiny-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1\n",
        "tiny-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: cp312-cp312-manylinux_2_39_aarch64\n",
        "tiny-1.dist-info/RECORD": b"",
    }
    path = folder / "tiny-1-cp312-cp312-manylinux_2_39_aarch64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("processor", "known", "platform", "problem"),
    [
        (183, True, "aarch64-manylinux_2_39", ""),
        (190, True, "aarch64-manylinux_2_39", ""),  # 190 is the machine code of a GPU
        (62, True, "aarch64-manylinux_2_39", "tiny/library.so is for another processor than aarch64"),
        (183, False, "aarch64-manylinux_2_39", "Hash mismatch"),
        (183, True, "x86_64-manylinux_2_39", "no wheels with a matching platform"),
    ],
)
def test_fetching_a_lock_file_finds_a_wrong_package(
    tmp_path: Path, monkeypatch, processor: int, known: bool, platform: str, problem: str
) -> None:
    value = wheel(tmp_path, processor)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    size, found = lock.fetch("tiny", "1", {value if known else "0" * 64}, "3.12", platform)
    assert problem in found and bool(problem) == bool(found)
    assert (size > 20) == ("another processor" in found or not found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "requirements/no.txt",
            "LOCK must be a file, got requirements/no.txt; take one of requirements/locks/",
        ),
        (
            "requirements/dev.txt",
            "LOCK must be a file whose name begins with gpu- or cpu-, got requirements/dev",
        ),
    ],
)
def test_setup_refuses_another_lock_file(tmp_path: Path, value: str, message: str) -> None:
    environment = {**os.environ, "LOCK": value, "VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path.name, document)
        for path in MANIFESTS
        for document in yaml.safe_load_all((ROOT / path).read_text())
    ]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every pod template of a RayJob or RayCluster as a Pod."""
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        for group in groups
    ]


RAY = [(name, document) for name, document in documents() if document["kind"].startswith("Ray")]


def test_manifests_follow_their_schemas() -> None:
    assert {document["kind"] for _, document in documents()} == set(SCHEMAS)
    for _, document in documents():
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    for _, document in RAY:
        for pod in pods(document):
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize(("name", "document"), RAY, ids=[name for name, _ in RAY])
def test_a_pod_has_what_a_run_needs(name: str, document: dict[str, Any]) -> None:
    for pod in pods(document):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["startupProbe"]["exec"]["command"] == ["vime", "doctor", "--device", "cuda"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        limits = container["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == ("4" if "gb200" in name else "8")
        assert any(key.startswith("rdma/") for key in limits)
    assert document["spec"].get("rayClusterSpec", document["spec"])["authOptions"] == {"mode": "token"}


def test_manifests_and_requirements_agree_on_ray() -> None:
    versions = {lock.read(lock.FOLDER / f"gpu-{arch}.txt")["ray"][0] for arch in ("amd64", "arm64")}
    for _, document in RAY:
        versions.add(document["spec"].get("rayClusterSpec", document["spec"])["rayVersion"])
    assert len(versions) == 1


def test_the_launchers_of_the_manifests_exist() -> None:
    for path in MANIFESTS:
        launchers = re.findall(r"scripts/run-[\w.-]+\.sh", (ROOT / path).read_text())
        assert launchers
        assert [name for name in launchers if not (ROOT / name).is_file()] == []


def test_the_schemas_find_faults() -> None:
    (_, job) = next(pair for pair in RAY if pair[1]["kind"] == "RayJob")
    wrong = copy.deepcopy(job)
    wrong["spec"]["entryPoint"] = wrong["spec"].pop("entrypoint")
    with pytest.raises(jsonschema.ValidationError, match="entryPoint|entrypoint"):
        jsonschema.validate(wrong, SCHEMAS["RayJob"])
    (pod, *_) = pods(copy.deepcopy(job))
    pod["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
