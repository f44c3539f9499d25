"""No process of a run imports from the folder where the user started it. Plug-ins come from PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime import hooks
from slime.system import import_path

ROOT = Path(__file__).parents[3]

DRIVER = """
import os, sys
import ray
from slime.cluster.ray_start import connect

connect()
assert "PYTHONSAFEPATH" not in os.environ, "the driver's other children may be scripts of the user"

@ray.remote
def look():
    import random, subprocess, sys
    from importlib.util import find_spec
    import plug_in
    below = [sys.executable, "-c", "import sys; print(sys.path)"]
    below = eval(subprocess.run(below, capture_output=True, text=True).stdout)
    return [*sys.path, below], random.__file__, find_spec("vllm").origin  # its import takes 4 s

path, random, vllm = ray.get(look.remote())
below = path.pop()
here = os.getcwd()
assert here not in path and "" not in path, path
assert here not in below and "" not in below, below
assert path.index(sys.argv[1]) < path.index(sys.argv[2])
assert not random.startswith(here) and not vllm.startswith(here)
print("good")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Changes to a folder whose files would replace modules of other packages."""
    for name in ("random.py", "vllm/__init__.py"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text("raise SystemExit('shadowed')", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run(*arguments: str, path: list[str], **variables: str) -> str:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
    environ.pop("RAY_ADDRESS", None)
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_workers_of_ray_do_not_search_the_current_folder(folder, tmp_path):
    """Ray would put the current folder and the script's folder first on the path. Children of workers do not search
    it either."""
    plug_ins = tmp_path / "plug-ins"
    plug_ins.mkdir()
    (plug_ins / "plug_in.py").touch()
    (folder / "driver.py").write_text(DRIVER, encoding="utf-8")
    arguments = ["-P", "driver.py", str(ROOT), str(plug_ins)]
    assert run(*arguments, path=[str(ROOT), str(plug_ins)]) == "good\n"


@pytest.mark.parametrize("start", [["-m", "vime"], ["-P", "-m", "vime"], [str(ROOT / "train.py")]])
def test_commands_do_not_search_the_current_folder(folder, start):
    """Commands import `random` late. Python reads an empty entry of PYTHONPATH as the current folder."""
    command = ["--help"] if start[-1].endswith("train.py") else ["models"]
    assert "qwen3" in run(*start, *command, path=[str(ROOT)]).lower() or command == ["--help"]


def test_an_empty_entry_of_the_variable_is_no_folder(folder, monkeypatch):
    path = ["", str(folder), "/usr/lib/python3"]
    environ = {"PYTHONPATH": f"plug-ins:{os.pathsep}/b:"}
    import_path.leave_current_folder(path, environ)
    assert path == ["/usr/lib/python3"]
    assert environ == {"PYTHONPATH": f"{folder}/plug-ins:/b"}
    path, environ = [str(folder)], {"PYTHONPATH": "."}
    import_path.leave_current_folder(path, environ)
    assert path == [str(folder)], "a folder that the user names stays"
    assert environ == {"PYTHONPATH": str(folder)}
    monkeypatch.chdir(ROOT)
    path, environ = [str(ROOT)], {}
    import_path.leave_current_folder(path, environ)
    assert (path, environ) == ([str(ROOT)], {}), "`python train.py` in a checkout that is not installed"


def test_a_plug_in_of_the_current_folder_gets_an_error_that_says_how(folder):
    (folder / "my_reward.py").write_text("def score(args, sample): return 1.0", encoding="utf-8")
    with pytest.raises(ValueError, match=f"the current folder has it, .* PYTHONPATH={folder}$"):
        hooks.load_function("my_reward.score", "--custom-rm-path")
    with pytest.raises(ValueError, match="name the file, my_reward.py:score, or add"):
        hooks.load_function("my_reward.score", "--custom-rm-path")
    with pytest.raises(ValueError, match="add its folder to PYTHONPATH$"):
        hooks.load_function("no_reward.score", "--custom-rm-path")


def test_a_clone_that_is_called_vime_does_not_hide_the_package(tmp_path):
    """If such a clone's folder is on PYTHONPATH, `vime train` must not run the clone's train.py."""
    (tmp_path / "vime").symlink_to(ROOT)
    command = [Path(sys.executable).with_name("vime"), "train", "--num-rollout", "1"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "--hf-checkpoint must be given" in done.stderr and "--num-rollout" not in done.stderr


@pytest.mark.parametrize("name", ["rl_kernel", "slime", "vime"])
def test_a_folder_with_the_name_of_a_package_does_not_hide_it(tmp_path, name):
    (tmp_path / name).mkdir()
    code = f"""if 1:
        import sys
        from slime.system.import_path import show_packages
        import os, vime.cli
        show_packages(os.environ)
        import {name}
        print({name}.__file__, os.environ["PYTHONPATH"])"""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [f"{ROOT}/{name}/__init__.py", f"{tmp_path}:{ROOT}"], done.stderr
