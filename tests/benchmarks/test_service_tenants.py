"""Runs the benchmark of the service's tenants on the real trainer and a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import service_tenants
from service_tenants import Progress, main

from vime.testing.tiny_model import write_tiny_model


def test_one_tenant_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["out.json", "--model", "nowhere", "--tenants", "1"])
    assert ended.value.code == 2
    assert "--tenants must be at least 2, got 1" in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a phase takes long, its log's last line is printed. A phase that fails adds nothing to the record."""
    out, log = tmp_path / "out.json", tmp_path / "engine.log"
    log.write_text("imports\nreads the weights\n")
    monkeypatch.setattr(service_tenants, "WAIT_S", 0.05)
    progress = Progress(out, {"note": "nothing else ran"})

    async def fail() -> None:
        raise RuntimeError("the engine ended")

    asyncio.run(progress.run("trainer", asyncio.sleep(0.2), log))
    with pytest.raises(RuntimeError, match="the engine ended"):
        asyncio.run(progress.run("engine", fail()))
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["note"] == "nothing else ran" and record["complete"] is False
    assert set(record["measured"]["seconds"]) == {"trainer"}
    assert 0.2 <= record["measured"]["seconds"]["trainer"] < 5
    printed = capsys.readouterr().out
    assert "trainer: not ready yet. reads the weights" in printed and "trainer: ready" in printed


@pytest.mark.slow
def test_it_measures_one_tenant_and_two(tmp_path: Path) -> None:
    model, out = write_tiny_model(tmp_path / "model"), tmp_path / "out.json"
    sizes = "--tenants 2 --rank 8 --sequences 2 --prompt 8 --response 8 --requests 4 --passes 4 --rounds 1"
    assert main([str(out), "--model", str(model), *sizes.split(), "--repeats", "1"]) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    measured = record["measured"]
    assert record["tenants"] == 2 and record["rank"] == 8 and record["complete"] is True
    assert set(measured["seconds"]) == {"trainer", "engine", "adapters of 2 tenants"}
    assert 0 < measured["switch_us"] < 10_000
    for kind in ("train", "sample", "both"):
        of_kind = measured[kind]
        assert of_kind["ratio"] == pytest.approx(of_kind["several"] / of_kind["one"])
        assert set(of_kind["repeats"]) == {"1", "2"}
