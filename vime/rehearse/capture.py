"""Runs a launch script with stand-ins for the programs that it starts, and returns the training commands that it would
have started.

If the kernel allows it, the script runs in a layer over the user's project, so that the files that the script writes
there are in the rehearsal's folder. Landlock forbids writes everywhere else.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.records.errors import FlagError
from vime.rehearse.confine import UNABLE
from vime.soak.parts import Descendants

KILLERS = [f"{before}kill{after}" for before, after in (("", ""), ("p", ""), ("", "all"))]
STANDING = [
    *(
        "python",
        "python3",
        "ray",
        "vime",
        "torchrun",
        "sudo",
        "numactl",
        "mpirun",
        "srun",
        "sbatch",
        *KILLERS,
    ),
    *("hf", "huggingface-cli", "modelscope", "pip", "pip3", "uv", "apt", "apt-get", "conda", "docker"),
    *(
        "ssh",
        "scp",
        "rsync",
        "curl",
        "wget",
        "git",
        "nvidia-smi",
        "sleep",
        "mkdir",
        "rm",
        "cp",
        "mv",
        "ln",
        "touch",
    ),
]
"""The programs that a script does not start."""
ENTRIES = re.compile(r"(^|/)train(_async)?\.py$")
SCRIPT = re.compile(rb"^#!.*\b(ba|da|z|k)?sh\b|^#!.*\benv\b")
LAST_LINES = 6
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
LAYER = (
    'set -e; for at in "$VIME_REHEARSE_PROJECT"; do '
    'mount -t overlay overlay -o "lowerdir=$at,upperdir=$VIME_REHEARSE/layer,workdir=$VIME_REHEARSE/layer-work" "$at"; '
    'done; cd "$at"; cd "$VIME_REHEARSE_CWD"; exec "$@"'
)


@dataclass(frozen=True)
class CapturedLaunch:
    """A training command of a script: its flags, the folder in which it starts, and the variables that it sets."""

    argv: list[str]
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Captured:
    """The training commands of a script, and remarks on its calls that failed."""

    launches: list[CapturedLaunch]
    remarks: list[str]


def capture_launches(
    script: Path, arguments: Sequence[str], folder: Path, *, gpus: int, deadline_s: float
) -> Captured:
    """Runs `script`, and returns its training commands in their order.

    Raises ValueError for a file that is no script, a script that starts no training, and a script that does not end.
    """
    _require_script(script)
    _write_stand_ins(folder)
    project = find_project(script)
    environ = _environment(folder, project, gpus)
    words = ["bash", str(script.resolve()), *arguments]
    output = folder / "script.log"
    code = _run(words, environ, project, folder, output, deadline_s)
    calls = [_read_call(path) for path in sorted((folder / "calls").iterdir()) if path.suffix == ""]
    launches = [launch for call in calls for launch in find_training(call)]
    remarks = [_remark(call) for call in calls if call.failed]
    if code is None:
        raise FlagError(
            "the script", f"end within {deadline_s:g} s", f"{script} still running", "raise --script-s"
        )
    if code == UNABLE and not calls:
        raise FlagError(
            "the kernel", "have Landlock to run a script without harm", "none", "give the script's flags"
        )
    if not launches:
        shown = "\n".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
        raise FlagError(
            "the script",
            "start a training with train.py, train_async.py or vime train",
            f"{script}, which ended with exit code {code} and these lines:\n{shown}",
            "give the script that starts the training, or its flags",
        )
    return Captured(launches, list(dict.fromkeys(remarks)))


def _require_script(script: Path) -> None:
    if not script.is_file():
        raise FlagError("the script", "be a file that exists", script, "check the path")
    start = script.read_bytes()[:4096]
    if b"\0" in start or not (SCRIPT.match(start) or script.suffix == ".sh"):
        raise FlagError("the script", "be a shell script", script, "give a .sh file, --config FILE, or flags")


def _write_stand_ins(folder: Path) -> None:
    for name in ("calls", "shims/bin", "layer", "layer-work", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shim = folder / "shims" / "shim.sh"
    shutil.copyfile(Path(__file__).with_name("shim.sh"), shim)
    shim.chmod(0o755)
    for name in STANDING:
        (folder / "shims" / "bin" / name).symlink_to(shim)


def find_project(script: Path) -> Path:
    """Returns the folder of the script's checkout, or the script's own folder."""
    own = script.resolve().parent
    return next((above for above in (own, *own.parents) if (above / ".git").exists()), own)


def _environment(folder: Path, project: Path, gpus: int) -> dict[str, str]:
    root = str(folder)
    return {
        **os.environ,
        **{"VIME_REHEARSE": root, "VIME_REHEARSE_PYTHON": sys.executable, "VIME_REHEARSE_GPUS": str(gpus)},
        **{"VIME_REHEARSE_PROJECT": str(project), "VIME_REHEARSE_CWD": os.getcwd()},
        **{
            "PATH": f"{root}/shims/bin:{os.environ['PATH']}",
            "VENV": f"{root}/shims",
            "TMPDIR": f"{root}/tmp",
        },
    }


def _run(
    words: list[str], environ: dict[str, str], project: Path, folder: Path, output: Path, deadline_s: float
) -> int | None:
    """Returns the exit code of the script, or None if it was ended at the deadline with everything that it started."""
    # a layer over the project would hide the records of a folder inside the project
    layered = not folder.resolve().is_relative_to(project) and _can_layer(environ)
    writable = [str(folder), "/dev/null", "/dev/tty", *([str(project)] if layered else [])]
    writable = [path for path in writable if os.path.exists(path)]
    words = [sys.executable, "-P", "-m", "vime.rehearse.confine", *writable, "--", *words]
    words = [*UNSHARE, "sh", "-c", LAYER, "sh", *words] if layered else words
    started = Descendants()
    with open(output, "wb") as log:
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            started.end()


def _can_layer(environ: dict[str, str]) -> bool:
    """Returns True if this kernel and user may put a layer over a folder."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", LAYER, "sh", "true"], env=environ, capture_output=True, timeout=20
    )
    return tried.returncode == 0


@dataclass(frozen=True)
class StandInCall:
    """A call of a stand-in."""

    words: list[str]
    environ: dict[str, str]
    folder: Path
    failed: bool


def _read_call(path: Path) -> StandInCall:
    words = path.read_bytes().decode("utf-8", errors="replace").split("\0")[:-1]
    pairs = path.with_name(f"{path.name}.env").read_bytes().decode("utf-8", errors="replace").split("\0")
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    folder = path.with_name(f"{path.name}.cwd").read_text(encoding="utf-8").strip()
    return StandInCall(words, environ, Path(folder), path.with_name(f"{path.name}.failed").exists())


def find_training(call: StandInCall) -> Iterator[CapturedLaunch]:
    """Yields the training command of a call: `python train.py`, `vime train`, or `ray job submit -- ...`."""
    words, variables = call.words, dict[str, str]()
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--runtime-env-json":
            value = value or (words[i + 1] if i + 1 < len(words) else "{}")
            try:
                variables |= {k: str(v) for k, v in json.loads(value).get("env_vars", {}).items()}
            except (ValueError, AttributeError) as error:
                raise FlagError(
                    "--runtime-env-json", "be a JSON object", value, "correct the script"
                ) from error
        ours = word == "train" and words[i - 1 : i] == ["vime"]
        if ENTRIES.search(word) or ours:
            environ = {
                k: v
                for k, v in call.environ.items()
                if os.environ.get(k) != v and not k.startswith("VIME_REHEARSE")
            }
            kept = {
                k: v
                for k, v in environ.items()
                if k not in ("PATH", "VENV", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_")
            }
            yield CapturedLaunch(words[i + 1 :], call.folder, kept | variables)
            return


def _remark(call: StandInCall) -> str:
    return (
        f"not done: {shlex.join(call.words)[:160]} (it failed, or would write outside the rehearsal's folder)"
    )
