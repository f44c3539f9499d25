"""Tests the files that a start keeps for the next start of the same user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime.system.start_cache import StartCache, files_fingerprint, start_cache_folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vime"


def loaded(fingerprint: str | None = "a") -> StartCache:
    cache = StartCache("flags", lambda: fingerprint)
    cache.load()
    return cache


def keep(fingerprint: str | None = "a") -> None:
    cache = loaded(fingerprint)
    cache.put("--x", {"dest": "x", "values": {"x": 1}})
    cache.save()


def test_a_later_start_of_the_same_installation_finds_the_values(folder: Path) -> None:
    keep()
    assert loaded().get("--x") == {"dest": "x", "values": {"x": 1}} and loaded().get("--y") is None
    assert loaded("another installation").get("--x") is None
    assert [file.name for file in folder.iterdir()] == ["flags.json"]


def test_the_last_installations_of_a_user_keep_their_values(folder: Path) -> None:
    """A user with two virtual environments starts with them in turn."""
    for name in "abcda":
        keep(name)
    keep("e")
    found = {name for name in "abcde" if loaded(name).get("--x") is not None}
    assert found == {"a", "c", "d", "e"}


def test_nothing_is_kept_for_an_unknown_installation(folder: Path) -> None:
    keep(None)
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"fingerprint": "a", "entries": {}}',
        '{"installations": 3}',
        '{"installations": {"a": 3}}',
        '{"installations": {"a": {}, "b": null}}',
    ],
)
def test_a_damaged_file_counts_as_missing_and_is_replaced(folder: Path, text: str) -> None:
    keep()
    (folder / "flags.json").write_text(text)
    assert loaded().get("--x") is None
    keep()
    assert loaded().get("--x") is not None


def test_a_folder_that_cannot_be_used_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file")
    assert start_cache_folder() is None
    keep()
    assert loaded().get("--x") is None
    folder.unlink()
    folder.mkdir(mode=0o777)
    os.chmod(folder, 0o777)
    assert start_cache_folder() is None, "another user could replace the values"
    (folder / "bytecode").mkdir(mode=0o700)
    assert start_cache_folder("bytecode") is None, "another user could replace the folder"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id without a home
    assert start_cache_folder() is None


def test_a_file_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.system.start_cache._MOST", 3)
    cache = loaded()
    for number in range(5):
        cache.put(str(number), number)
    cache.save()
    assert [loaded().get(str(number)) for number in range(5)] == [None, None, None, 3, 4]


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    file = tmp_path / "parser.py"
    file.write_text("a = 1")
    before = files_fingerprint([file])
    assert files_fingerprint([file]) == before
    file.write_text("a = 12")
    assert files_fingerprint([file]) != before
