"""The trainer's state leaves a GPU and comes back: every byte, all of its memory, at the speed of the host link.

The last test reads the error of a trainer that runs out of memory.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.memory.cards import Cards

sys.path.insert(0, str(Path(__file__).parents[1] / "slime"))  # the cases of the CPU tests
cases = pytest.importorskip("trainer_cases", reason="needs megatron-core")

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""445 M parameters: 0.9 GB of weights, 1.8 GB of gradients, 5.3 GB of main weights and moments in bf16."""

AWAY = {"colocate": True, "offload_train": True}
PARTS = ("parameters", "optimizer")
"""Parts of the state whose bytes are copied."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("offload")
    cases.make_checkpoints(root, **SHAPE)
    return root


@pytest.fixture
def build(root, tmp_path):
    from slime.megatron_backend.step.trainer import MegatronTrainer

    made: list[MegatronTrainer] = []

    def end() -> None:
        while made:
            made.pop().close()
        gc.collect()  # Megatron's parts refer to each other
        torch.cuda.empty_cache()

    def build_one(**flags: Any) -> MegatronTrainer:
        end()
        usual = {"device": "cuda", "fp32": False, "bf16": True, "rl_kernel_workspace_mib": 64}
        flags = usual | {"update_weight_transport": "disk"} | flags
        config = cases.make_config(root, weight_dir=str(tmp_path / "weights"), **flags)
        store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        made.append(MegatronTrainer(config, 0, 1, init_method=f"file://{store}"))
        return made[-1]

    yield build_one
    end()


def state(trainer: Any) -> Iterator[torch.Tensor]:
    from slime.megatron_backend.storages import iter_parameters, iter_states

    yield from iter_parameters([trainer.policy.model])
    yield from iter_states(trainer.policy.optimizer)


def resident_gib() -> float:
    """Returns the GiB of this process's pages in memory, pinned pages included."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(x for x in status.splitlines() if x.startswith("VmRSS:")).split()[1]) / 2**20


def seconds(act: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def link_gib_per_s() -> dict[str, float]:
    """Returns the speed of a plain copy of 1 GiB of pinned memory, the best of 5 in each direction."""
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    down = min(seconds(lambda: host.copy_(device, non_blocking=True)) for _ in range(5))
    up = min(seconds(lambda: device.copy_(host, non_blocking=True)) for _ in range(5))
    return {"offload": 1 / down, "onload": 1 / up}


def test_every_byte_and_all_memory_come_back_at_the_speed_of_the_link(build):
    trainer = build(**AWAY)
    residence = trainer.policy.residence
    cases.train(trainer)  # after training, the moments are not zero
    residence.bring("parameters", "gradients", "optimizer")
    before = [tensor.detach().cpu().clone() for tensor in state(trainer)]
    torch.cuda.empty_cache()
    at_home, segments_at_home = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    size = sum(residence.nbytes(part) for part in PARTS)
    link = link_gib_per_s()
    torch.cuda.empty_cache()
    best = dict.fromkeys(link, 0.0)
    resident = []
    for _ in range(4):
        residence.release("gradients")
        best["offload"] = max(best["offload"], size / 2**30 / seconds(lambda: residence.release(*PARTS)))
        gone = at_home - torch.cuda.memory_allocated()
        assert gone == pytest.approx(size + residence.nbytes("gradients"), rel=0.01)
        # The freed memory is also free for other processes, except segments with a remaining small tensor.
        assert segments_at_home - torch.cuda.memory_reserved() > 0.95 * gone
        best["onload"] = max(best["onload"], size / 2**30 / seconds(lambda: residence.bring(*PARTS)))
        residence.bring("gradients")
        assert torch.cuda.memory_allocated() == at_home
        resident.append(resident_gib())
        for tensor, wanted in zip(state(trainer), before, strict=True):
            assert torch.equal(tensor.cpu(), wanted)
    print(f"{size / 2**30:.2f} GiB; GiB/s {best}, plain pinned copies {link}; host {resident} GiB")
    assert resident[-1] - resident[1] < 0.1, resident
    for way, speed in best.items():
        assert speed >= 0.8 * link[way], (way, best, link)


def test_training_is_bit_for_bit_that_of_a_trainer_that_stays(build):
    def run(**flags: Any) -> tuple[list[Any], list[torch.Tensor], dict[str, float]]:
        trainer = build(**flags)
        steps = []
        for i in range(3):
            result, _ = cases.train(trainer, i, seed=i)
            steps.append(result.steps)
            trainer.next_weights(i + 1, {})
            assert trainer.next_weights(i + 1, {}) is None
        trainer.policy.residence.bring("parameters", "optimizer")
        return steps, [tensor.detach().cpu().clone() for tensor in state(trainer)], result.perf

    stays, again, leaves = run(), run(), run(**AWAY)
    if stays[0] != again[0]:
        pytest.fail("the same training twice differs by itself: nothing can be said of an offloaded one")
    assert leaves[0] == stays[0]
    for got, wanted in zip(leaves[1], stays[1], strict=True):
        assert torch.equal(got, wanted)
    perf = leaves[2]
    assert perf["perf/offload_gib_per_s"] > 1 and perf["perf/onload_gib_per_s"] > 1
    # A micro-batch of 32 tokens uses little memory in addition to the state. The estimate leaves out norms, biases and
    # padding.
    assert perf["perf/memory/peak_of_estimate"] == pytest.approx(1, abs=0.1), perf


def test_an_engine_that_comes_back_reads_the_host_copy(build):
    from safetensors.torch import load_file

    trainer = build(**AWAY)
    cases.train(trainer)
    wanted = cases.exported(trainer)
    trainer.next_weights(1, {})
    assert trainer.next_weights(1, {}) is None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = load_file(trainer.weights_file().info["path"])
    assert torch.cuda.max_memory_allocated() - before < 2**20  # the device was not needed
    assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_out_of_memory_tells_the_peaks_and_what_lowers_them(build):
    trainer = build(colocate=True, offload_train=False)
    cases.train(trainer)
    torch.cuda.empty_cache()
    # This process may use 64 MiB more, less than the gradient of an MLP weight before it is added to the
    # buffer.
    allowed = torch.cuda.memory_reserved() + 64 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            cases.train(trainer, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    text = str(caught.value)
    print(text)
    assert text.startswith("out of device memory while training rollout 1: CUDA out of memory")
    assert f"\ncard {Cards().read()[0].index}: " in text  # the driver's number, not torch's
    assert "this rank keeps, by its shapes: weights " in text
    for words in ("trainer ", "actor_train ", "forward ", "what lowers it: "):
        assert words in text.partition("peaks so far, GiB: ")[2], text
