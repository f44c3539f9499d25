"""Tests models by their name on the Hugging Face hub: the local copy, the download, and the error without them."""

from __future__ import annotations

import socket

import huggingface_hub
import pytest

from slime.checkpoints.hub import is_hub_name, local_checkpoint


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Makes a hub cache with one model, and turns the network off."""
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--owner--tiny" / "refs").mkdir()
    (tmp_path / "models--owner--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def refuse(*_: object) -> None:
        raise AssertionError("the network must not be used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return snapshot


def test_paths_are_no_hub_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_name("owner/tiny")
    for path in ("models/tiny", "./owner/tiny", "/owner/tiny", "owner", "a/b/c"):
        assert not is_hub_name(path)
        assert local_checkpoint(path, "--hf-checkpoint", download=True) == path


@pytest.mark.parametrize("download", [False, True])
def test_the_local_copy_is_used_without_a_network(cache, download):
    assert local_checkpoint("owner/tiny", "--hf-checkpoint", download=download) == str(cache)


def test_a_model_that_is_not_here(cache):
    assert local_checkpoint("owner/other", "--ref-load", download=False) == "owner/other"
    with pytest.raises(
        ValueError,
        match=r"--ref-load must be a directory, or a model of the Hugging Face hub that can be downloaded, got "
        r"owner/other \(.+\); check the path, or the name, the network and HF_HUB_OFFLINE",
    ):
        local_checkpoint("owner/other", "--ref-load", download=True)
