"""Runs scripts/slurm/ with real Ray on two loopback addresses and a double of Slurm.

The tests check the exit status, the token, the names of missing nodes, and that no process is left.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_double

ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = """
import os, sys, time, ray
ray.init(logging_level="ERROR", log_to_driver=False)
@ray.remote(num_cpus=1)
def where():
    time.sleep(1)
    return ray.get_runtime_context().get_node_id()
nodes = set(ray.get([where.remote() for _ in range(2)]))
print("nodes:", len(nodes), "argument:", sys.argv[1], "mode:", os.environ["RAY_AUTH_MODE"])
sys.exit(7)
"""


@pytest.fixture
def job(tmp_path: Path):
    """Runs scripts/slurm/grpo.sh with a launcher that sees both nodes and exits with 7."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("srun", "scontrol"):
        script = bin_dir / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {slurm_double.__file__} {name} "$@"\n')
        script.chmod(0o755)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    launcher = tmp_path / "launcher.sh"
    launcher.write_text(f'exec {sys.executable} {tmp_path / "launcher.py"} "$@"\n')

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "scripts/slurm/grpo.sh", *(arguments or (str(launcher), "--flag"))],
            cwd=ROOT,
            env={
                **os.environ,
                "PATH": f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "VENV": sys.prefix,
                "SLURM_JOB_ID": str(os.getpid()),
                "SLURM_JOB_NODELIST": "node-[a-b]",
                "SLURM_SUBMIT_DIR": str(ROOT),
                "OUT": str(tmp_path),
                "SRUN_OPTIONS": str(tmp_path / "options"),
                "RAY_START_OPTIONS": "--num-cpus=1 --object-store-memory=80000000",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=180,
        )

    return run


def job_dir(tmp_path: Path) -> Path:
    return tmp_path / f"slurm-{os.getpid()}"


def left_over(folder: Path) -> list[str]:
    """Returns the command lines of the processes that have the job's token file in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:150])
        except OSError:
            pass  # the process has ended
    return found


def assert_no_orphans(folder: Path) -> None:
    end = time.monotonic() + 60  # Ray's helpers need some time to notice the end of their parent
    while left_over(folder) and time.monotonic() < end:
        time.sleep(0.2)
    assert left_over(folder) == []


@pytest.mark.slow
def test_the_launcher_runs_on_all_nodes_and_its_status_is_the_jobs(job, tmp_path: Path) -> None:
    done = job(IMAGE="vime.sqsh", MOUNTS="/data:/data")
    assert "2 of 2 nodes have joined" in done.stdout, done.stdout + done.stderr
    assert "nodes: 2 argument: --flag mode: token" in done.stdout
    assert done.returncode == 7
    options = (tmp_path / "options").read_text().splitlines()
    assert "--container-image=vime.sqsh" in options
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data" in options
    assert_no_orphans(job_dir(tmp_path))
    assert not (job_dir(tmp_path) / "token").exists()
    assert (job_dir(tmp_path) / "left-node-b").exists()


@pytest.mark.slow
def test_a_node_that_never_joins_is_named_and_the_job_ends(job, tmp_path: Path) -> None:
    done = job(HANGING_NODES="node-b", JOIN_TIMEOUT_S="5", END_TIMEOUT_S="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "got 1 of 2; missing: node-b; set JOIN_TIMEOUT_S" in done.stderr, done.stderr
    assert "node-b has not started Ray" in done.stderr
    assert "nodes: " not in done.stdout  # the launcher did not run
    assert_no_orphans(job_dir(tmp_path))


def test_a_first_node_that_never_starts_is_named(job, tmp_path: Path) -> None:
    done = job(HANGING_NODES="node-a", HEAD_TIMEOUT_S="1", END_TIMEOUT_S="0")
    assert done.returncode != 0
    assert "node-b: Ray's head on node-a must answer within 1 s" in done.stderr, done.stderr
    assert "the first node, node-a, ended before the launcher did" in done.stderr
    assert_no_orphans(job_dir(tmp_path))


def test_only_the_user_can_read_the_token(job, tmp_path: Path) -> None:
    """srun fails at once here, as for a node that is down. The job's folder and token exist by then."""
    seen = tmp_path / "seen"
    (tmp_path / "bin" / "srun").write_text(f'#!/bin/sh\ncp -p "$JOB_DIR/token" {seen}\nexit 3\n')
    done = job()
    assert done.returncode == 3
    assert "the first node, node-a, ended before the launcher did" in done.stderr
    assert stat.S_IMODE(seen.stat().st_mode) == 0o600
    assert stat.S_IMODE(job_dir(tmp_path).stat().st_mode) == 0o700
    assert len(seen.read_text()) == 64


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("no-such-launcher.sh",), {}, "the launcher must be a file, got no-such-launcher.sh"),
        ((), {"SLURM_JOB_ID": ""}, "must run as a Slurm job; submit it with sbatch"),
        (
            (),
            {"IMAGE": "vime.sqsh", "OUT": ""},
            "OUT must name a folder that all nodes see where IMAGE is set",
        ),
        ((), {"SLURM_SUBMIT_DIR": "/usr"}, "sbatch must be called in the repository's root, got /usr"),
    ],
)
def test_wrong_calls(job, arguments: tuple[str, ...], environment: dict[str, str], message: str) -> None:
    done = job(*arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
