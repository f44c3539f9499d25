"""Hooks by file, `folder/file.py:name`, for every flag that takes a hook."""

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
    for _ in range(2):  # a file that failed is no module at the second time
        with pytest.raises(kind, match=message):
            load_function(path, "--custom-rm-path")


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
