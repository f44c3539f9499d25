"""Tests hooks by file, `folder/file.py:name`, for every flag that takes a hook."""

from __future__ import annotations

import pickle
import sys
import threading

import pytest

from slime.config import Config
from slime.hooks import MissingHookError, absolute, load_function
from slime.rules.resolve import resolve

FILE = """
import dataclasses
import neighbour_of_hook

@dataclasses.dataclass
class Point:
    x: int = 3

def score(args, sample):
    return neighbour_of_hook.VALUE

constant = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour_of_hook.py").write_text("VALUE = 0.5")
    (tmp_path / "random.py").write_text(FILE)
    yield tmp_path
    sys.modules.pop("neighbour_of_hook", None)


def test_a_file_with_the_name_of_an_installed_module_is_loaded_once(folder):
    score = load_function("random.py:score", "--custom-rm-path")
    assert score(None, None) == 0.5
    assert load_function(f"{folder}/random.py:score") is score
    assert sys.path[-1] == str(folder) and "score" not in vars(sys.modules["random"])
    point = load_function("random.py:Point")()
    assert pickle.loads(pickle.dumps(point)) == point


def test_threads_get_a_whole_module(folder):
    (folder / "slow.py").write_text("import time\ntime.sleep(0.2)\ndef late(): return 1\n")
    found = []
    threads = [threading.Thread(target=lambda: found.append(load_function("slow.py:late"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


@pytest.mark.parametrize(
    "path, kind, message",
    [
        (
            "random.py:scor",
            MissingHookError,
            r"a function of random.py, got 'scor'; did you mean random.py:score\?",
        ),
        (
            "random.py:constant",
            ValueError,
            "must name a function or class, got 'random.py:constant' of type int",
        ),
        (
            "missing.py:score",
            MissingHookError,
            "--custom-rm-path must name a file that exists, got 'missing.py:score'",
        ),
        ("broken.py:score", ValueError, "importing broken.py raised ZeroDivisionError"),
        ("lacking.py:score", MissingHookError, "'lacking.py:score': No module named 'no_such_dependency'"),
    ],
)
def test_errors_name_the_file(folder, path, kind, message):
    (folder / "broken.py").write_text("1 / 0")
    (folder / "lacking.py").write_text("import no_such_dependency")
    for _ in range(2):  # a file that failed must not be a loaded module the second time
        with pytest.raises(kind, match=message):
            load_function(path, "--custom-rm-path")


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("several.py", "of the file, got 'several.py'; write several.py:first or several.py:second"),
        ("several.py:", "of the file, got 'several.py:'; write several.py:first or several.py:second"),
        ("{folder}/several.py", "write {folder}/several.py:first or {folder}/several.py:second"),
        ("several.py:absent", "got 'absent'; write several.py:first or several.py:second"),
        ("several.py:NUMBER", "of type int; write several.py:first or several.py:second"),
        ("no_functions.py", "of the file, got 'no_functions.py'; it defines none"),
        ("no_text.py", "of the file, got 'no_text.py'; it defines none"),
        ("absent.py", "--custom-rm-path must name a file that exists, got 'absent.py'; check the path"),
        ("many.py", "write many.py:f0 or many.py:f1 or many.py:f2 or many.py:f3 (and 2 more)"),
    ],
)
def test_a_file_without_a_function_is_answered_with_its_functions(folder, path, end):
    """`--custom-rm-path several.py` names the functions of the file, not a missing module."""
    text = "from os.path import join\nNUMBER = 1\nclass Box: ...\n"
    (folder / "no_functions.py").write_text(text)
    (folder / "several.py").write_text(
        f"{text}def first(args, sample): ...\nasync def second(args, sample): ...\ndef _private(): ...\n"
    )
    (folder / "no_text.py").write_text("def (")
    (folder / "many.py").write_text("".join(f"def f{number}(): ...\n" for number in range(6)))
    with pytest.raises(ValueError) as error:
        load_function(path.format(folder=folder), "--custom-rm-path")
    assert str(error.value).startswith("--custom-rm-path must name a ")
    assert str(error.value).endswith(end.format(folder=folder))


def test_a_module_in_place_of_its_function(folder, monkeypatch):
    package = folder / "package_of_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("from package_of_rewards import sums\n")
    (package / "sums.py").write_text("def score(args, sample): ...\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ValueError, match=r"of type module; write package_of_rewards\.sums\.score$"):
        load_function("package_of_rewards.sums", "--custom-rm-path")


def test_the_configuration_has_absolute_files(folder):
    given = {
        "custom_rm_path": "random.py:score",
        "rollout_sample_hook_path": ["random.py:score", "os.path.join"],
        "selected_logprob_provider": "random.py:score",
        "rm_type": "math, random.py:score",
    }
    c = resolve(given)
    here = f"{folder}/random.py:score"
    assert isinstance(c, Config) and c.reward.custom_rm_path == here == absolute("random.py:score")
    assert c.rollout.rollout_sample_hook_path == [here, "os.path.join"]
    assert c.kernels.selected_logprob_provider == here
    assert c.reward.rm_type == f"math,{here}"
    assert c.data.data_source_path == Config.from_flat({}).data.data_source_path, "a dotted path stays"
