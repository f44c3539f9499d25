"""Tests direct copies of updates into the experts of a real vLLM. Experts stay plain on a CPU with --rlk-bitwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_fixtures import make_experts, publish_checkpoint
from offline_engine import offline_engine, plain_matrices
from torch import nn

from vime.vllm.cpu.offline import WORKER

pytestmark = pytest.mark.e2e

LAYERS, EXPERTS = 4, 4


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's worker. Its `push(version)` loads one of two checkpoints and compares the live weights with it."""
    root = tmp_path_factory.mktemp("experts")
    made = [make_experts(root / str(seed), seed, layers=LAYERS, experts=EXPERTS) for seed in (0, 1)]
    settings = {"weight_transfer_config": {"backend": "vime"}, "worker_cls": WORKER}
    with (
        pytest.MonkeyPatch.context() as patch,
        plain_matrices(patch),
        offline_engine(made[0], root / "weights", patch, **settings) as engine,
    ):
        worker = engine.worker

        def push(version: int) -> None:
            update = publish_checkpoint(made[version % 2], root / "weights", version, checksums=True)
            for load in (True, False):
                worker.start_weight_update()
                worker.update_weights({**update.message(), "info": {**update.info, "load": load}})
                worker.finish_weight_update()

        worker.push = push
        yield worker


@pytest.fixture
def loads(worker: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Resets the engine's views. Returns a list that gets the names of each load by vLLM's loader."""
    from vime.vllm.worker.weight_views import ViewCache

    worker.weight_transfer_engine.known = ViewCache()
    model, names = worker.model_runner.model, []
    load = model.load_weights

    def load_weights(weights: Any) -> object:
        listed = list(weights)
        names.append([name for name, _ in listed])
        return load(listed)

    monkeypatch.setattr(model, "load_weights", load_weights)
    return names


def expert_modules(worker: Any) -> list[Any]:
    from vime.vllm.worker.live_experts import has_experts

    return [module for module in worker.model_runner.model.modules() if has_experts(module)]


def test_the_first_update_is_copied_after_a_test_of_two_layers(worker: Any, loads: list[list[str]]) -> None:
    for version in (1, 2, 3):
        worker.push(version)
    engine = worker.weight_transfer_engine
    per_layer = (
        6 + 2 + 1 + 3 * EXPERTS
    )  # attention with norms of queries and keys, two norms, router, experts
    assert engine.views.count == LAYERS * per_layer + 3
    (tested,) = loads
    assert len(tested) == LAYERS * (per_layer - 3 * EXPERTS) + 2 * 3 * EXPERTS + 3
    with_experts = {name.split(".")[2] for name in tested if ".experts." in name}
    assert with_experts == {"0", str(LAYERS - 1)}


def test_each_kind_of_layers_is_tested(worker: Any, loads: list[list[str]], monkeypatch: Any) -> None:
    method = expert_modules(worker)[1].quant_method
    monkeypatch.setattr(method, "__class__", type("OtherMethod", (type(method),), {}))
    worker.push(1)
    assert {name.split(".")[2] for name in loads[0] if ".experts." in name} == {"0", "1", str(LAYERS - 1)}


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_experts_in_another_order_leave_updates_to_the_loader(
    worker: Any, loads: list[list[str]], monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    from vime.vllm.worker import live_experts

    right, wrong = live_experts.local_experts, expert_modules(worker)[layer]

    def swapped(module: nn.Module, local: int) -> list[int]:
        found = right(module, local)
        return found[::-1] if module is wrong else found

    with monkeypatch.context() as patch:
        patch.setattr(live_experts, "local_experts", swapped)
        with pytest.raises(RuntimeError, match="live weights must equal"):
            worker.push(1)  # the comparison reads the experts in the wrong order, too
    assert worker.weight_transfer_engine.views is None and len(loads) == 2
    worker.push(2)
    assert worker.weight_transfer_engine.views is None
