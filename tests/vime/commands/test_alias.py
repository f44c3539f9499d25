"""The import paths of upstream vime give the same objects as slime's in each process, and vime's own modules come
first."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

import slime.rollout.rm_hub.math_utils
import slime.rollout.sglang_rollout
import slime.utils.types
import vime
from slime.hooks import load_function
from vime.alias import Alias, install


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("vime.utils.types", slime.utils.types),
        ("vime.rollout.rm_hub.math_utils", slime.rollout.rm_hub.math_utils),
        ("vime.rollout.vllm_rollout", slime.rollout.sglang_rollout),
    ],
)
def test_a_module_has_two_names_and_is_loaded_once(path, owner):
    specification = owner.__spec__
    assert importlib.import_module(path) is owner
    assert sys.modules[path] is owner and owner.__spec__ is specification
    assert owner.__name__.startswith("slime.")


def test_both_ways_to_import():
    import vime.utils.misc as module
    from vime.rollout.vllm_rollout import generate_rollout
    from vime.utils import types
    from vime.utils.types import Sample

    assert types is slime.utils.types and Sample is slime.utils.types.Sample
    assert module.load_function is load_function
    assert generate_rollout is slime.rollout.sglang_rollout.generate_rollout
    assert load_function("vime.rollout.rm_hub.async_rm") is load_function("slime.rollout.rm_hub.async_rm")


def test_own_modules_come_first():
    backends, flags = importlib.import_module("vime.backends"), importlib.import_module("vime.commands.flags")
    assert backends.__name__ == "vime.backends" and "vllm" in backends.BACKENDS
    assert flags.__name__ == "vime.commands.flags"
    aliased = importlib.import_module("vime.backends.megatron_utils")
    assert aliased.__name__ == "slime.backends.megatron_utils"


@pytest.mark.parametrize(
    "path", ["vime.utils.nothing", "vime.backends.nothing", "vime.nothing", "vime.ray.nothing"]
)
def test_what_slime_has_not_is_not_found(path):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{path}'"):
        importlib.import_module(path)


def test_the_finder_is_installed_once():
    install()
    importlib.reload(vime)
    assert sum(isinstance(finder, Alias) for finder in sys.meta_path) == 1


def test_pickles_are_the_same_in_a_process_that_has_not_seen_the_alias():
    from vime.utils.types import Sample

    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).tokens, 'vime' in sys.modules)"
    sent = pickle.dumps(Sample(tokens=[1, 2]))
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[0] == "[1, 2] False"


def test_threads_that_import_both_names_at_once():
    """The test uses a new process, in which nothing is loaded yet."""
    code = (
        "import threading, importlib, vime\n"
        "names = ['vime.utils.types', 'slime.utils.types'] * 8\n"
        "found = []\n"
        "run = lambda name: found.append(importlib.import_module(name))\n"
        "threads = [threading.Thread(target=run, args=(name,)) for name in names]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(found), len({id(module) for module in found}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["16", "1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from vime.utils.typs import Sample",
            r"No module named 'vime.utils.typs'; did you mean vime.utils.types\?",
        ),
        (
            "import slime.utils.http_util",
            r"No module named 'slime.utils.http_util'; did you mean slime.utils.http_utils\?",
        ),
        (
            "from slime.utils.types import Smaple",
            r"cannot import name 'Smaple' .*; did you mean slime.utils.types.Sample\?",
        ),
        (
            "from vime.utils.types import quark",
            "cannot import name 'quark' .*; slime.utils.types defines no such",
        ),
        ("import no_such_package", "No module named 'no_such_package'$"),
        (
            "from slime.ray.training_recovery import recover",
            "No module named 'slime.ray.training_recovery'; `vime train` places and starts the processes",
        ),
        (
            "from slime.backends.megatron_utils.parallel import ranks",
            "'slime.backends.megatron_utils.parallel'; the trainer of `vime train` builds the model",
        ),
        ("from slime.ray.placement_group import groups", "cannot import name 'groups'"),
    ],
)
def test_an_import_of_a_plug_in_that_fails_names_the_nearest(line, said, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"plug_in_{abs(hash(line))}"
    (tmp_path / f"{name}.py").write_text(f"{line}\n\n\ndef score(args, sample): ...\n")
    with pytest.raises(ValueError, match=said) as caught:
        load_function(f"{name}.score", flag="--custom-rm-path")
    assert str(caught.value).startswith(
        f"--custom-rm-path must name a module that can be imported, got '{name}.score'"
    )


def test_a_path_that_does_not_exist_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"no module 'vime.rollout.vllm_rolout'; did you mean vime.rollout.vllm_rollout"
    ):
        load_function("vime.rollout.vllm_rolout.generate_rollout", flag="--rollout-function-path")
