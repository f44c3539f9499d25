"""Tests `vime replay` on a run of the tiny model: equal bits, flipped bits, and bad input."""

from __future__ import annotations

import re
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from recorded_run import chain_again, make_config, read_lines, record_run, write_lines
from torch.distributed.checkpoint import FileSystemReader

from slime.receipts.digests import digest
from slime.receipts.flags import check_receipt
from vime.cli import main

KEY = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIAcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcH
-----END PRIVATE KEY-----
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the key of the run, and another key."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "key.pem").write_text(KEY)
    (folder / "other.pem").write_text(KEY.replace("HBwcHBwcH\n", "HBwcHBwgI\n"))
    return folder


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, folder: Path) -> Path:
    return record_run(tiny_model, folder / "run", receipt_key=str(folder / "key.pem"))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the run, in another folder."""
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    """Returns the exit code and the output of `vime replay`."""
    code = main(["replay", *map(str, argv)])
    found = capsys.readouterr()
    return code, found.out + found.err


def test_all_steps_are_equal_and_the_receipt_is_whole(
    recorded: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = call(capsys, recorded, "--step", "all")
    assert code == 0, text
    assert "replay of all steps from the start of the run (step 0)" in text
    assert "0 differing bits: 3 of 3 steps" in text
    code, text = call(capsys, recorded, "--verify", "--key", folder / "key.pem")
    assert code == 0, text
    assert "whole: 7 records of 1 rank(s), 3 steps" in text and "signed by ea4a6c63e29c520a (" in text


def test_the_record_of_a_step_has_the_state_and_both_optimizer_steps(recorded: Path) -> None:
    begin, step, checkpoint, *_ = read_lines(recorded)
    assert [begin["kind"], step["kind"], checkpoint["kind"]] == ["begin", "step", "checkpoint"]
    assert len(step["steps"]) == 2 and step["steps"][0].keys() >= {"train/loss", "train/grad_norm"}
    name = "embedding.word_embeddings.weight"
    assert begin["state"][name] != step["state"][name]
    assert {f"optimizer {name}.exp_avg", f"optimizer {name}.exp_avg_sq"} <= step["state"].keys()
    saved = torch.load(recorded / "receipt" / "columns" / "0_0.pt", weights_only=True)["rollout_data"]
    assert [digest(row) for row in saved["trained_log_probs"]] == step["results"]["trained_log_probs"]
    assert [digest(row) for row in saved["advantages"]] == step["results"]["advantages"]
    assert len(begin["code"]["slime"]) == 64 and "torch" in begin["packages"]


def flip_sample(run: Path) -> None:
    """Flips the lowest bit of the first response token of sample 5 of rollout 1, in the bytes of the saved file."""
    path = run / "receipt" / "samples" / "1.pt"
    sample = torch.load(path, weights_only=True)["samples"][5]
    content = bytearray(path.read_bytes())
    pickled = b"(" + b"".join(b"K" + struct.pack("B", token) for token in sample["tokens"])
    place = content.index(pickled) + 2
    content[place] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_a_sample_is_found_without_a_trainer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.load(run / "receipt" / "samples" / "1.pt", weights_only=True)["samples"][5]["tokens"][0]
    flip_sample(run)
    code, text = call(capsys, run, "--verify")
    assert code == 1
    assert (
        f"step 1: samples differ: sample 5, column tokens, at [0]: recorded {before}, recomputed {before ^ 1} "
        in text
    )
    assert "the saved samples are not those that the trainer got" in text
    assert "1 problems: 7 records" in text


def flip_columns(run: Path) -> None:
    """Flips a bit of an advantage of rollout 2 in the saved columns."""
    path = run / "receipt" / "columns" / "2_0.pt"
    record = torch.load(path, weights_only=True)
    value = record["rollout_data"]["advantages"][3]
    value.view(torch.int32)[1] ^= 1
    torch.save(record, path)


def test_a_flipped_bit_in_a_saved_column_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_columns(run)
    code, text = call(capsys, run, "--verify")
    assert code == 1
    index = read_lines(run)[5]["indices"][3]
    assert f"2_0.pt: sample {index}, column advantages must have the digest of the receipt" in text


def flip_checkpoint(run: Path, iteration: int, key: str) -> None:
    """Flips the lowest bit of the third number of a tensor, in the bytes of the checkpoint's file."""
    folder = run / "checkpoints" / f"iter_{iteration:07d}"
    stored = FileSystemReader(folder).read_metadata().storage_data
    place = next(value for index, value in stored.items() if index.fqn == key)
    path = folder / place.relative_path
    content = bytearray(path.read_bytes())
    entry = bytes(content[place.offset : place.offset + place.length])
    scratch = folder.parent / "entry.zip"
    scratch.write_bytes(entry)
    with zipfile.ZipFile(scratch) as file:
        data = next(info for info in file.infolist() if info.filename.endswith("data/0"))
    scratch.unlink()
    name, extra = struct.unpack("<HH", entry[data.header_offset + 26 : data.header_offset + 30])
    content[place.offset + data.header_offset + 30 + name + extra + 8] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "key", ["decoder.final_layernorm.weight", "optimizer.state.exp_avg.embedding.word_embeddings.weight"]
)
def test_verify_names_the_damaged_tensor_of_a_checkpoint(
    run: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_checkpoint(run, 0, key)
    code, text = call(capsys, run, "--verify")
    assert code == 1
    assert f"/__0_0.distcp must have the digest of the receipt, got other bytes in tensor {key};" in text


def test_bad_input_is_one_line(
    recorded: Path, run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*argv: object) -> str:
        code, text = call(capsys, *argv)
        assert code == 2 and text.count("\n") == 1, text
        return text

    assert "--step must be a trained step of RUN (0 to 2) or all, got 7" in error(recorded, "--step", 7)
    assert "--step must be the number of a step or all, got last" in error(recorded, "--step", "last")
    assert "RUN_DIR must be a run directory of vime train" in error(tmp_path, "--step", 0)
    assert "must be signed by the key" in error(recorded, "--verify", "--key", folder / "other.pem")
    assert "--key must name a readable PEM file" in error(recorded, "--verify", "--key", folder / "none.pem")
    (tmp_path / "text.pem").write_text("no key")
    assert "--key must name a PEM file without a password" in error(
        recorded, "--verify", "--key", tmp_path / "text.pem"
    )
    records = read_lines(run)
    write_lines(run, records[:3] + records[4:])
    assert (
        "records must follow each other, got record 4 (checkpoint) after record 2 (checkpoint); 1 record(s)"
        in error(run, "--step", 1)
    )
    write_lines(run, [*records[:1], records[1] | {"seconds": 0.0}, *records[2:]])
    assert "record 1 (step 0) must have the hash" in error(run, "--verify")
    write_lines(run, chain_again(records[:2] + records[3:]))
    assert "must have a signature of the key ea4a6c63e29c520a, got another one" in error(run, "--verify")
    (run / "receipt" / "trainer-0.jsonl").unlink()
    assert "RUN must have a receipt, got no" in error(run, "--step", 1)
    shutil.rmtree(run / "receipt")
    assert "RUN must have a receipt, got no" in error(run, "--step", 1)


def test_a_receipt_is_verified_elsewhere(
    recorded: Path,
    run: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In another working directory, from a copy of the run, while the run's own directory does not exist."""
    monkeypatch.chdir(tmp_path)
    away = recorded.rename(recorded.with_name("away"))
    try:
        code, text = call(capsys, run, "--verify", "--key", folder / "key.pem")
    finally:
        away.rename(recorded)
    assert code == 0, text
    assert "whole: 7 records of 1 rank(s), 3 steps" in text


def test_a_receipt_without_its_last_steps_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(run, read_lines(run)[:3])
    code, text = call(capsys, run, "--verify")
    assert code == 1 and "the receipt of rank 0 must have steps 0 to 2, got none of [1, 2]" in text


def test_a_run_without_samples_and_the_receipt_of_another_run_are_errors(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.json"
    config.write_text(config.read_text().replace('"lr": 0.01', '"lr": 0.02'))
    code, text = call(capsys, run, "--verify")
    assert code == 1 and "the receipt is of another run, or the flags were changed" in text
    shutil.rmtree(run / "receipt" / "samples")
    code, text = call(capsys, run, "--step", 1)
    assert code == 2 and "RUN_DIR must have saved rollouts, got none" in text


def test_a_key_that_cannot_sign_is_an_error_before_the_run(tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model, tmp_path, receipt_key=str(tmp_path / "none.pem"))
    with pytest.raises(ValueError, match="--receipt-key must name a readable PEM file"):
        check_receipt(config)


@pytest.mark.slow
def test_flipped_weights_and_optimizer_states_are_named_with_their_values(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay names the tensor in a damaged checkpoint, and computes its true value from an earlier state."""
    flip_checkpoint(run, 0, "optimizer.state.param.decoder.final_layernorm.weight")
    code, text = call(capsys, run, "--step", 1)
    assert code == 1
    assert "step 0: weights differ: tensor decoder.final_layernorm.weight" in text
    assert re.search(r"at \[2\]: recorded \S+, recomputed \S+ \(1 of 64 differ\)", text), text
    assert "the recorded side is damaged" in text


@pytest.mark.slow
def test_a_flipped_bit_in_an_optimizer_state_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = FileSystemReader(run / "checkpoints" / "iter_0000001").read_metadata().storage_data
    keys = sorted(
        {index.fqn for index in stored if "exp_avg" in index.fqn and "final_layernorm" in index.fqn}
    )
    flip_checkpoint(run, 1, keys[0])
    code, text = call(capsys, run, "--step", 2)
    assert code == 1
    assert "step 1: optimizer differ: tensor optimizer decoder.final_layernorm.weight.exp_avg" in text
    assert re.search(r"at \[2\]: recorded \S+, recomputed \S+", text), text


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [{}, {"tensor_model_parallel_size": 2}, {"lora_rank": 4, "lora_alpha": 8}],
    ids=["dp2", "tp2", "lora"],
)
def test_two_ranks_are_equal(
    tiny_model: Path, tmp_path: Path, flags: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tiny_model, tmp_path / "run", ranks=2, **flags)
    for step in ("all", "2"):
        code, text = call(capsys, run, "--step", step)
        assert code == 0, text
        assert "0 differing bits" in text and "2 rank(s)" in text
    code, text = call(capsys, run, "--verify")
    assert code == 0, text
    assert "receipt" in text or "not signed" in text
