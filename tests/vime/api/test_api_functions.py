"""Functions of the caller reach another process as files, also those of a notebook or a script."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slime.hooks import load_function
from vime.api import functions

SCRIPT = """
import sys
from pathlib import Path
from vime.api import functions

BONUS = 0.5

def helper(text):
    return float(len(text))

def my_reward(completions, **columns):
    return [helper(c) + BONUS for c in completions]

paths = functions.write(Path(sys.argv[1]), {("custom_rm_path", None): my_reward, ("rm_type", 1): lambda a, b: 2.0})
print(*paths.values(), sep="\\n")
"""


def of_module(args: object, sample: object) -> float:
    return 3.0


def test_functions_of_a_script_come_with_what_they_read(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "python")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    own, other = done.stdout.split()
    assert own == f"{tmp_path}/python/functions.py:my_reward" and other.endswith(":function")
    (tmp_path / "script.py").unlink()
    assert load_function(own)(["ab", ""]) == [2.5, 0.5]
    assert load_function(other)(None, None) == 2.0


def test_a_function_of_a_module_stays_that_of_the_module(tmp_path: Path) -> None:
    (path,) = functions.write(tmp_path / "python", {("custom_rm_path", None): of_module}).values()
    assert load_function(path) is of_module
    functions.remove(tmp_path / "python")
    assert not (tmp_path / "python").exists()


def test_two_functions_of_one_name_stay_two(tmp_path: Path) -> None:
    def make(value: float):
        def score(args, sample):
            return value

        return score

    paths = functions.write(tmp_path, {("rm_type", 0): make(1.0), ("rm_type", 1): make(2.0)})
    assert [load_function(path)(None, None) for path in paths.values()] == [1.0, 2.0]


def test_a_function_that_cannot_be_copied_is_one_line(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(args, sample):
        return float(lock.locked())

    with pytest.raises(
        ValueError, match="--custom-rm-path must be a function that can be copied to the pro.*; make"
    ):
        functions.write(tmp_path / "python", {("custom_rm_path", None): locked})
    assert not (tmp_path / "python").exists()
