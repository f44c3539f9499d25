"""Tests deltas in a real engine: its live weights equal the trainer's, and a delta that does not fit changes
nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_fixtures import make_checkpoint
from offline_engine import OfflineEngine, offline_engine
from safetensors.torch import load_file

from slime.protocols import WeightUpdate
from slime.weight_sync.channel import Export, Part, TrainerSettings
from slime.weight_sync.delta.refusals import refusals
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.publisher import Publisher

RECEIVERS = {"engine-0-1": 1}
TOKENS = [5, 9, 17, 30, 22, 8, 41, 12, 3, 19]


class Trainer:
    """A trainer that starts from the checkpoint's weights and changes a few values with each version."""

    def __init__(self, checkpoint: Path, weight_dir: Path) -> None:
        self.tensors = load_file(checkpoint / "model.safetensors")
        place = TrainerSettings(weight_dir, 1 << 20, torch.device("cpu"), 60.0)
        self.publisher = Publisher.of(
            *("disk", place, Export(lambda: self.tensors.items())),
            compare=True,
            snapshot=Snapshot("xor", "xxh3-128"),
        )

    def update(self, version: int, *, changed: bool = True) -> WeightUpdate:
        if changed:
            for i, tensor in enumerate(self.tensors.values()):
                tensor.view(-1)[version + i :: 37] *= 1.25
        part = self.publisher.next(version, RECEIVERS)
        assert part is not None and self.publisher.next(version, RECEIVERS) is None
        return part


def whole_log_probs(engine: OfflineEngine, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the log-probs after a load of the whole file, without a delta."""
    receiver = engine.worker.weight_transfer_engine
    engine.worker.start_weight_update()
    part = Part({n: list(t.shape) for n, t in tensors.items()}, tensors.__getitem__, True, True, whole=True)
    with torch.no_grad():
        receiver._take_all(part)
    engine.worker.finish_weight_update()
    return engine.log_probs(TOKENS)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def of_transformers(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def check_parts(engine: OfflineEngine, trainer: Trainer, new: torch.Tensor) -> None:
    """Updates come in parts. `new` has the log-probs of the live weights before."""
    # the parts come as in a broadcast, and the last part is lost
    part = trainer.update(5, changed=False)
    engine.take(part)
    part = trainer.update(6)
    payloads = load_file(part.info["path"])
    names = sorted(payloads)
    receiver = engine.worker.weight_transfer_engine
    for given, message in (
        (names, None),
        (names[:-1], rf"must have all {len(names)} tensors, got {len(names) - 1}"),
    ):
        engine.worker.start_weight_update()
        for name in given:
            shape = {name: list(payloads[name].shape)}
            piece = Part(shape, payloads.__getitem__, True, False, whole=False, series="one")
            with receiver.delta.whole(piece, part.weights) as found:
                assert (found is not None) == (name == names[-1])
                if found is not None:
                    receiver._take_all(found)
        if message is None:
            engine.worker.finish_weight_update()
            live = engine.log_probs(TOKENS)
            part = trainer.update(7)
            payloads = load_file(part.info["path"])
        else:
            with pytest.raises(ValueError, match=message):
                engine.worker.finish_weight_update()
    assert not torch.equal(live, new)


def test_deltas_give_the_trainers_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, weights = make_checkpoint(tmp_path / "base"), tmp_path / "weights"
    weights.mkdir(mode=0o700)
    monkeypatch.setenv("VIME_LOCAL_CHECKPOINT_DIR", str(tmp_path / "local"))
    with offline_engine(checkpoint, weights, monkeypatch) as engine:
        assert dist.get_rank() == 0
        trainer = Trainer(checkpoint, weights)
        before = engine.log_probs(TOKENS)
        for version in range(3):
            part = trainer.update(version, changed=version > 0)
            assert part.weights.kind == ("delta" if version else "full")
            engine.take(
                part
            )  # this compares every live tensor with the copy, and the copy's checksums with the trainer's
            got = engine.log_probs(TOKENS)
            assert torch.equal(got, before) == (version == 0)
        assert sorted(path.name for path in (tmp_path / "local").iterdir()) == [
            "lock",
            "model.safetensors",
            "state.json",
        ]
        assert torch.equal(got, whole_log_probs(engine, trainer.tensors))

        # The error names a damaged delta, the live weights stay, and the same update then brings the whole set.
        part = trainer.update(3)
        damage(Path(part.info["path"]))
        engine.worker.start_weight_update()
        engine.worker.update_weights(part.message())
        (said,) = refusals(part)
        assert "a delta to version 3 must give the trainer's weights, got 1 tensors that differ: " in said
        assert torch.equal(engine.log_probs(TOKENS), got)
        whole = trainer.update(3, changed=False)
        assert whole.weights.kind == "full"
        engine.worker.update_weights(whole.message())
        engine.worker.finish_weight_update()
        new = engine.log_probs(TOKENS)
        assert torch.equal(new, whole_log_probs(engine, trainer.tensors)) and not torch.equal(new, got)

        # the engine misses this delta
        trainer.update(4)
        part = trainer.update(5)
        engine.take(part)
        (said,) = refusals(part)
        assert "a delta to version 5 must be applied to version 4, got version 3 in" in said
        assert torch.equal(engine.log_probs(TOKENS), new)
        check_parts(engine, trainer, new)


@pytest.mark.slow
def test_workers_share_the_copy_of_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two workers applies a delta. Both load their parts of the copy, and compare each live tensor."""
    checkpoint, weights = make_checkpoint(tmp_path / "base"), tmp_path / "weights"
    weights.mkdir(mode=0o700)
    monkeypatch.setenv("VIME_LOCAL_CHECKPOINT_DIR", str(tmp_path / "local"))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with offline_engine(checkpoint, weights, monkeypatch, tensor_parallel_size=2) as engine:
        trainer = Trainer(checkpoint, weights)
        for version in range(4):
            part = trainer.update(version, changed=version > 0)
            assert part.weights.kind == ("delta" if version else "full")
            engine.take(part)
            assert not refusals(part)
            wanted = of_transformers(checkpoint, trainer.tensors)
            assert (engine.log_probs(TOKENS) - wanted).abs().max() < 1e-5

        # One worker finds that a delta does not fit, and the other finds no copy any more. Then the whole set comes.
        part = trainer.update(4)
        damage(Path(part.info["path"]))
        before = engine.log_probs(TOKENS)
        engine.on_workers("start_weight_update")
        engine.on_workers("update_weights", part.message())
        said = sorted(refusals(part))
        assert len(said) == 2, said
        assert "must be applied to version 3, got no complete copy" in said[0], said
        assert "must give the trainer's weights, got 1 tensors that differ" in said[1], said
        assert torch.equal(engine.log_probs(TOKENS), before)
        engine.on_workers("update_weights", trainer.update(4, changed=False).message())
        engine.on_workers("finish_weight_update")
        wanted = of_transformers(checkpoint, trainer.tensors)
        assert (engine.log_probs(TOKENS) - wanted).abs().max() < 1e-5
        engine.take(trainer.update(5))
