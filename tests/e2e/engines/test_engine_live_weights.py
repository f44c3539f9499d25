"""Tests the comparison of --check-weight-update-equal on real vLLM models in this process.

On CPUs, vLLM computes with packed copies of the matrices. The tests corrupt each kind of live tensor, and the error
must name it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from offline_engine import plain_matrices, started
from safetensors.torch import load_file, save_file
from torch import nn

from slime.weight_sync.buckets import compute_bucket_bytes, fill

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        yield from started(tmp_path_factory.mktemp("live"), patch, tied=request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, plain_matrices(patch):
        yield from started(tmp_path_factory.mktemp("plain"), patch, tied=request.param)


def push(worker: Any, version: int, *, load: bool = True) -> None:
    update = worker.update(version)
    worker.start_weight_update()
    worker.update_weights({**update.message(), "info": {**update.info, "load": load}})
    worker.finish_weight_update()


def test_loaded_weights_equal_the_published_ones(worker: Any) -> None:
    push(worker, 0)
    push(worker, 1)
    push(worker, 1, load=False)
    # All tensors differ except the norms, which are ones in both: 7 matrices in each of 2 layers, the embedding, an
    # own head.
    with pytest.raises(RuntimeError, match="got 15 that differ" if worker.tied else "got 16 that differ"):
        push(worker, 2, load=False)


def packed_with(weight: torch.Tensor, module: nn.Module) -> None:
    """Gives `module` a copy of `weight` that vLLM's own function has packed."""
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
    # an element in the rows of the keys
    matrix[4 * 32 + 5, 7] = torch.nextafter(matrix[4 * 32 + 5, 7], torch.tensor(9.0))
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
    """If the head is tied, vLLM's reload alone leaves a stale packed copy of the old weights."""
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
    """Sends an update in buckets of (tensors, whether to load them), which this function packs in place of another
    process. `groups` has one letter per bucket for the group that sends it; without `groups`, buckets are in
    shared memory. The calls bypass vLLM's worker, which would accept no more updates after one that failed at its
    end."""
    engine = worker.weight_transfer_engine
    engine.start_weight_update()
    for number, (tensors, load) in enumerate(sent):
        items = list(tensors.items())
        bucket = torch.empty(compute_bucket_bytes(items), dtype=torch.uint8)
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
            bucket.fill_(255)  # the trainer fills the bucket again, so the engine must keep a copy
    engine.finish_weight_update()


def halves(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Splits every other tensor off, so that fused projections arrive in two buckets."""
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
    """A repeated broadcast also replaces half-loaded layers: vLLM keeps a layer's values until the layer is
    complete."""
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


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Captures the output of vLLM's loggers."""
    caplog.set_level(logging.INFO, "vllm.vime.weight_views")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def find_weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: x.data.clone() for name, x in worker.model_runner.model.named_parameters()}


def learn_again(worker: Any) -> None:
    """Resets the known parameter views, as in a new engine."""
    from vime.vllm.worker.weight_views import ViewCache

    worker.weight_transfer_engine.known = ViewCache()


def the_loader_stays(worker: Any, said: pytest.LogCaptureFixture, why: str) -> None:
    """The engine loads each update with vLLM's loader, logs the reason once, and each update is right."""
    learn_again(worker)
    for version in (0, 1, 2):
        push(worker, version)
        assert worker.weight_transfer_engine.views is None
        push(worker, version, load=False)
    assert said.text.count("vLLM's loader loads each update of weights") == 1
    assert why in said.text


def test_updates_go_to_their_places_from_the_first_on(plain: Any) -> None:
    """The test compares each update. Padding is filled as vLLM's loader fills it, because sleep may leave any values
    there."""
    learn_again(plain)
    engine, by_loader = plain.weight_transfer_engine, {}
    engine.known._has_none = True
    for version in (0, 1):
        push(plain, version)
        assert engine.views is None
        by_loader[version] = find_weights(plain)
    embedding = plain.model_runner.model.model.embed_tokens
    rows = embedding.shard_indices.num_org_elements
    assert len(embedding.weight) > rows
    learn_again(plain)
    for version in (2, 3, 4):
        embedding.weight.data[rows:] = torch.nan
        push(plain, version)
        assert engine.views.count == 2 * 11 + (2 if plain.tied else 3)
        found = find_weights(plain)
        wanted = by_loader[version % 2]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(RuntimeError, match="that differ"):
        push(plain, 5, load=False)


def test_buckets_go_to_their_places(plain: Any) -> None:
    learn_again(plain)
    engine = plain.weight_transfer_engine
    for version in (1, 2, 3):
        first, second = halves(load_file(plain.update(version).info["path"]))
        push_buckets(plain, [(first, True), (second, True), (first, False), (second, False)])
        assert engine.views is not None
        push(plain, version, load=False)
    if plain.tied:  # vLLM ignores a head in the update if the embedding is tied
        head = {"lm_head.weight": {**first, **second}["model.embed_tokens.weight"]}
        push_buckets(
            plain, [({**first, **head}, True), (second, True), (first, False), ({**second, **head}, False)]
        )
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {**first, **second, name: first.get(name, second.get(name)) + 1}
    with pytest.raises(RuntimeError, match=rf"got 1 that differ: {name}"):
        push_buckets(plain, [(first, True), (second, True), (wrong, False)])
    whole = [(first, True), (second, True), (first, False), (second, False)]
    push_buckets(plain, [*whole[:1], *whole], "abbbb")  # a broadcast that begins again
    push(plain, 3, load=False)
    with pytest.raises(ValueError, match="missing from the update"):
        push_buckets(plain, [(first, True)])
    other = "model.layers.0.input_layernorm.weight"
    for bad in ({other: torch.ones(63)}, {"model.layers.9.input_layernorm.weight": torch.ones(64)}):
        with pytest.raises(ValueError, match="must hold the checkpoint's tensors, got model.layers"):
            push_buckets(plain, [(bad, True)])


@pytest.mark.parametrize("names", [("k_proj", "v_proj"), ("input_layernorm", "post_attention_layernorm")])
def test_wrong_places_are_not_used(
    plain: Any, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """The test swaps two tensors with equal shapes. Both checkpoints' norms are ones, so their values would not show
    it."""
    from vime.vllm.worker import weight_receiver

    right = weight_receiver.live_tensors

    def swapped(*args: Any) -> Iterator[Any]:
        for name, module, value in right(*args):
            there = next((each for each in names if "layers.0." in name and f".{each}." in name), None)
            if there is not None:
                name = name.replace(there, names[1 - names.index(there)])
            yield name, module, value

    monkeypatch.setattr(weight_receiver, "live_tensors", swapped)
    the_loader_stays(plain, said, "vLLM puts 2 tensors elsewhere")


def test_places_are_found_again_where_parameters_have_moved(plain: Any) -> None:
    learn_again(plain)
    for version in (0, 1, 2):
        push(plain, version)
    engine = plain.weight_transfer_engine
    before = engine.views
    push(plain, 3)
    assert engine.views is before
    weight = plain.model_runner.model.get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.data = weight.data.clone()
    push(plain, 4)
    assert engine.views is not None and engine.views is not before
    push(plain, 4, load=False)


def test_a_model_that_keeps_more_than_its_parameters_has_no_places(
    plain: Any, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    model = plain.model_runner.model
    load, norm = model.load_weights, model.model.norm
    monkeypatch.setattr(norm, "doubled", torch.zeros(64), raising=False)

    def load_and_double(weights: Any) -> object:
        listed = dict(weights)
        norm.doubled.copy_(2 * listed["model.norm.weight"])
        return load(listed.items())

    monkeypatch.setattr(model, "load_weights", load_and_double)
    the_loader_stays(plain, said, "0.model.norm.doubled, which is not a parameter, follows from the weights")


@pytest.mark.parametrize("failures", [1, 2])
def test_a_trial_without_memory_is_repeated_once(
    plain: Any, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, failures: int
) -> None:
    """A host's allocator would end the process, so the test raises a GPU's error in the middle of the load."""
    from vime.vllm.worker import weight_views

    right, trials = weight_views.random_weights, 0

    def too_large(*args: Any) -> Any:
        nonlocal trials
        trials += 1
        part, fails = right(*args), trials <= failures

        def get(name: str) -> torch.Tensor:
            if fails and "layers.1.mlp" in name:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 778.00 MiB.")
            return part.get(name)

        return replace(part, get=get)

    monkeypatch.setattr(weight_views, "random_weights", too_large)
    learn_again(plain)
    for version in (0, 1, 2):
        push(plain, version)
        assert (plain.weight_transfer_engine.views is None) == (version == 0 or failures == 2)
        push(plain, version, load=False)
    why = "update of weights: the test of the views ran out of memory: CUDA out of memory. Tried to"
    assert [said.text.count(f"{which} {why}") for which in ("this", "each")] == [1, failures - 1]
    assert trials == 2


def test_packed_matrices_have_no_places(worker: Any, said: pytest.LogCaptureFixture) -> None:
    the_loader_stays(worker, said, "model.embed_tokens packs its weights")


def test_an_update_that_ended_half_way_leaves_the_next_one_to_the_loader(plain: Any) -> None:
    learn_again(plain)
    push(plain, 0)
    engine = plain.weight_transfer_engine
    engine._begin_reload()  # an update that fails while vLLM loads it leaves this state
    push(plain, 1)
    assert engine.views is None
    push(plain, 2)
    assert engine.views is not None
