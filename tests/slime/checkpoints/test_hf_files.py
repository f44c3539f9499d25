"""Weight files are readable for the machine's other users. A file that this user may not read has a separate error."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch

from slime.checkpoints.hf_config import open_weights, read_index
from slime.checkpoints.hf_files import write_shards, write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_decides_who_may_read(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors({"a": torch.ones(2)}, tmp_path / "one.safetensors")
        write_shards(iter([("a", torch.ones(8)), ("b", torch.ones(8))]), tmp_path, max_shard_bytes=32)
    finally:
        os.umask(before)
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert files == {
        "model-00001-of-00002.safetensors": mode,
        "model-00002-of-00002.safetensors": mode,
        "model.safetensors.index.json": mode,
    }


def test_one_function_writes_weights() -> None:
    """safetensors and `mkstemp` create files with mode 0600, whatever the umask is. The launcher of plug-ins writes a
    script that only its user should read, and the cache of a start is its user's."""
    root = Path(__file__).parents[3]
    found = [
        str(file.relative_to(root))
        for package in ("rl_kernel", "slime", "vime")
        for file in (root / package).rglob("*.py")
        if re.search(r"\b(save_file|save_model|mkstemp|NamedTemporaryFile)\(", file.read_text())
    ]
    own = {"slime/plug_ins/launch.py", "slime/system/start_cache.py"}
    assert set(found) == {"slime/checkpoints/hf_files.py", *own}


def test_a_file_of_another_user_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read all files, so the test replaces the system's answer."""
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    file.write_bytes(b"not read")
    index.write_text("not read")
    file.chmod(0o600)
    index.chmod(0o600)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    for read in (lambda: open_weights(file, "pt"), lambda: read_index(tmp_path)):
        with pytest.raises(
            ValueError, match=r"must be readable for the user of the run, got mode 0600.*chmod a\+r"
        ):
            read()
