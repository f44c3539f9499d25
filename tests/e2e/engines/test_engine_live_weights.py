"""The comparison behind --check-weight-update-equal, on real vLLM models in this process.

On CPU vLLM computes with packed copies of the matrices; each kind of live tensor is corrupted here and must be named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_fixtures import make_checkpoint, publish_checkpoint
from offline_engine import leave_what_is_there
from safetensors.torch import load_file, save_file
from torch import nn

from slime.weight_sync.buckets import fill, room_for

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's worker with a tiny model; `update(version)` of it is what the trainer published."""
    root = tmp_path_factory.mktemp("live")
    checkpoint = make_checkpoint(root / "first", seed=0, tied=request.param)
    other = make_checkpoint(root / "second", seed=1, tied=request.param)
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    patch.setenv("VLLM_HOST_IP", "127.0.0.1")
    patch.setenv("VIME_WEIGHT_DIR", str(root / "weights"))
    patch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it; undone with the patch
    from vllm import LLM

    leave_what_is_there(patch)
    llm = LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        weight_transfer_config={"backend": "vime"},
        disable_log_stats=True,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    worker.update = lambda version: publish_checkpoint(
        other if version % 2 else checkpoint, root / "weights", version, checksums=True
    )
    worker.tied = request.param
    yield worker
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    patch.undo()


def push(worker: Any, version: int, *, load: bool = True) -> None:
    update = worker.update(version)
    worker.start_weight_update()
    worker.update_weights({**update.message(), "info": {**update.info, "load": load}})
    worker.finish_weight_update()


def test_loaded_weights_equal_the_published_ones(worker: Any) -> None:
    push(worker, 0)
    push(worker, 1)
    push(worker, 1, load=False)
    # All but the norms, which are ones in both: 7 matrices in each of 2 layers, the embedding, the head if it is one.
    with pytest.raises(RuntimeError, match="got 15 that differ" if worker.tied else "got 16 that differ"):
        push(worker, 2, load=False)


def packed_with(weight: torch.Tensor, module: nn.Module) -> None:
    """Give `module` a packed copy made of `weight`, by vLLM's own packing."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    kept = module.weight
    module.weight = nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
    module.weight = kept


def test_one_changed_element_of_a_packed_matrix_is_found(worker: Any) -> None:
    from vime.vllm.worker.live_weights import _packed_matrix

    push(worker, 3)
    model = worker.model_runner.model
    qkv = model.model.layers[1].self_attn.qkv_proj
    assert qkv.weight.numel() == 0, "vLLM keeps the packed copy only"
    matrix = _packed_matrix(qkv).contiguous()
    assert matrix.shape == (4 * 32 + 2 * 32 + 2 * 32, 64)
    matrix[4 * 32 + 5, 7] = torch.nextafter(matrix[4 * 32 + 5, 7], torch.tensor(9.0))  # a row of the keys
    packed_with(matrix, qkv)
    with pytest.raises(RuntimeError, match=r"got 1 that differ: model\.layers\.1\.self_attn\.k_proj\.weight"):
        push(worker, 3, load=False)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_one_changed_element_of_a_parameter_is_found(worker: Any, path: str, name: str) -> None:
    push(worker, 3)
    worker.model_runner.model.get_parameter(path).data.view(-1)[3] += 1e-6
    with pytest.raises(RuntimeError, match=f"got 1 that differ: {name}"):
        push(worker, 3, load=False)


def test_a_stale_copy_of_the_head_is_found(worker: Any) -> None:
    """What vLLM's reload alone leaves behind where the head is tied: its packed copy of the weights before."""
    push(worker, 5)
    model = worker.model_runner.model
    rows = model.lm_head.weight.shape[0]
    packed_with(torch.zeros(rows, 64), model.lm_head)
    name = "model.embed_tokens.weight" if worker.tied else "lm_head.weight"
    with pytest.raises(RuntimeError, match=f"got 1 that differ: {name}"):
        push(worker, 5, load=False)
    push(worker, 6)


def test_tied_heads_must_be_packed_again_after_a_reload(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.vllm.worker import weight_receiver

    push(worker, 6)
    monkeypatch.setattr(weight_receiver, "repack_tied_weights", lambda model: None)
    if worker.tied:
        with pytest.raises(RuntimeError, match=r"got 1 that differ: model\.embed_tokens\.weight"):
            push(worker, 7)
    else:
        push(worker, 7)


def test_a_model_with_tensors_that_the_update_lacks_is_refused(worker: Any) -> None:
    from vime.vllm.worker.live_weights import differing_tensors

    model = worker.model_runner.model
    with pytest.raises(ValueError, match="in the model only"):
        differing_tensors(model, ["model.norm.weight"], lambda name: torch.ones(64))


def push_buckets(worker: Any, sent: list[tuple[dict[str, torch.Tensor], bool]], groups: str = "") -> None:
    """An update in buckets, (tensors, whether to load them): what another process would send is packed here. `groups`:
    a letter each for the group that sends it; without, in memory that is shared. Without vLLM's worker in between,
    which would take no more updates after one that failed at its end."""
    engine = worker.weight_transfer_engine
    engine.start_weight_update()
    for number, (tensors, load) in enumerate(sent):
        items = list(tensors.items())
        bucket = torch.empty(room_for(items), dtype=torch.uint8)
        info = {"tensors": fill(bucket, items), "load": load}
        channel = "nccl" if groups else "ipc"
        engine._receiver(channel).take = lambda *where, bucket=bucket: bucket
        if groups:
            whole = [
                (name, dtype, shape, [([(0, size) for size in shape], first)])
                for name, dtype, shape, first in info["tensors"]
            ]
            regions = [(0, 0, bucket.nbytes)]
            group = {"store": groups[number]}
            info |= {"tensors": whole, "regions": regions, "bytes": bucket.nbytes, "group": group}
        engine.update_weights({"channel": channel, "info": {"handles": {}, **info}})
        if not groups:
            bucket.fill_(255)  # the trainer fills it again: what the engine keeps must be its own
    engine.finish_weight_update()


def halves(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """In between, so that fused projections arrive in two buckets."""
    names = sorted(state)
    return [{name: state[name] for name in part} for part in (names[::2], names[1::2])]


def test_buckets_become_the_live_weights(worker: Any) -> None:
    first, second = halves(load_file(worker.update(11).info["path"]))
    push_buckets(worker, [(first, True), (second, True), (first, False), (second, False)])
    push(worker, 11, load=False)
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {**first, **second}
    wrong[name] = wrong[name] + 1
    with pytest.raises(RuntimeError, match=rf"got 1 that differ: {name}"):
        push_buckets(worker, [(first, True), (second, True), (wrong, False)])


@pytest.mark.parametrize("given_up", [1, 2, 3], ids=["half of the layers", "all", "half of the comparison"])
def test_a_broadcast_that_begins_again_brings_everything_anew(worker: Any, given_up: int) -> None:
    """Also to layers of which a half had come, which vLLM keeps until it has as many values as the layer takes."""
    push(worker, 12)
    first, second = halves(load_file(worker.update(13).info["path"]))
    whole = [(first, True), (second, True), (first, False), (second, False)]
    push_buckets(worker, [*whole[:given_up], *whole], "a" * given_up + "bbbb")
    push(worker, 13, load=False)


def test_buckets_must_bring_and_compare_everything(worker: Any) -> None:
    first, second = halves(load_file(worker.update(12).info["path"]))
    with pytest.raises(RuntimeError, match=f"got {len(first)} of {len(first) + len(second)}"):
        push_buckets(worker, [(first, True), (second, True), (first, False)])
    with pytest.raises(ValueError, match="missing from the update"):
        push_buckets(worker, [(first, True)])


def test_an_untied_head_must_be_in_the_update(worker: Any) -> None:
    update = worker.update(8)
    state = load_file(update.info["path"])
    state.pop("lm_head.weight", None)
    save_file(state, update.info["path"])
    message = {"channel": "disk", "info": {"path": update.info["path"]}}
    worker.start_weight_update()
    if worker.tied:
        worker.update_weights(message)
        worker.finish_weight_update()
    else:
        with pytest.raises(ValueError, match=r"lm_head\.weight missing from the file"):
            worker.update_weights(message)
