"""Compares models with vision tower with transformers on samples with images: logits, gradients of every tensor, and
the bytes of weights. Checks shared prompts, frozen towers and bad inputs."""

from __future__ import annotations

import re

import pytest
import torch
from family_cases import CASES
from megatron_cases import assert_gradients_equal, hf_gradients, make_config, sum_loss, tiny_checkpoint
from safetensors.torch import load_file
from tower_cases import KEYS, count_tokens, image_hidden, image_logits, make_samples, read_vision

from slime.data.packing import pack
from slime.data.sharing.prompts import sample_images, shared_prompts
from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
from slime.megatron_backend.model.gpt import build_model, output_weight, unwrap
from slime.megatron_backend.model.model_config import load_hf_config
from slime.megatron_backend.model.vision.towers import TOWERS
from slime.megatron_backend.parallel import destroy_parallel, init_parallel
from slime.models import family_for
from slime.models.vision import PREFIX

MODELS = [name for name, case in CASES.items() if case.kind in TOWERS]
VOCAB = 99


@pytest.fixture(scope="module", autouse=True)
def single_rank(tmp_path_factory):
    init_parallel(0, 1, make_config(), init_method=f"file://{tmp_path_factory.mktemp('init')}/store")
    yield
    destroy_parallel()


def with_weights(directory, **config):
    model = build_model(load_hf_config(directory), make_config(multimodal_keys=KEYS, **config))
    load_hf(model, directory)
    return model


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, tmp_path_factory):
    """Returns (directory, transformers' model, this project's model, vision) for one tiny model."""
    case, directory = CASES[request.param], tmp_path_factory.mktemp("hf")
    hf = tiny_checkpoint(directory, case.kind, **case.shape)
    return directory, hf, with_weights(directory, train_vision=True), read_vision(directory)


def logits(model, data, vision, **options):
    return (image_hidden(model, data, vision, **options) @ output_weight(model).T)[:, :VOCAB]


def test_logits(tiny):
    _, hf, model, vision = tiny
    data = make_samples(vision)
    with torch.no_grad():
        wanted, got = image_logits(hf, data), logits(model, data, vision)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        pixels = make_samples(vision, seed=1)["multimodal_train_inputs"]
        others = logits(model, data | {"multimodal_train_inputs": pixels}, vision)
    assert (others - got).abs().max() > 1e-3, "other pixels give other logits"


def test_weights_of_the_tower_are_exported_as_they_were_loaded(tiny, tmp_path):
    directory, _, model, _ = tiny
    original, exported = load_file(directory / "model.safetensors"), dict(export_hf(model))
    others = set(family_for(load_hf_config(directory)).prediction_names(original, load_hf_config(directory)))
    assert exported.keys() == original.keys() - others
    assert all(torch.equal(exported[name], original[name]) for name in exported)
    save_hf(model, directory, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(written[name], original[name]) for name in original)


def test_equal_images_go_through_the_tower_once(tiny):
    """Equal samples share all their tokens too. The logits are those without sharing."""
    _, _, model, vision = tiny
    grids = [(1, 4, 8), (1, 4, 4)]
    one = make_samples(vision, [grids])
    data = {name: column * 3 for name, column in one.items()}
    batch = pack(data, [0, 1, 2], [], device="cpu", vision=vision)
    counts = [count_tokens(vision, grid) for grid in grids]
    assert [medium.tokens for medium in batch.images.media] == counts
    assert len(batch.images.rows) == 3 * sum(counts)
    images = sample_images(data, [0, 1, 2], vision)
    length = len(one["tokens"][0])
    assert shared_prompts(data, [0, 1, 2], [], images) == [(0, 0), (0, length), (0, length)]
    with torch.no_grad():
        alone = logits(model, one, vision)
        torch.testing.assert_close(logits(model, data, vision), alone.repeat(3, 1), rtol=0, atol=1e-5)


def test_other_images_are_another_prompt(tiny):
    _, _, _, vision = tiny
    first, second = (make_samples(vision, [[(1, 4, 8)]], seed) for seed in (0, 1))
    data = {name: first[name] + second[name] for name in first}
    data["tokens"] = first["tokens"] * 2
    images = sample_images(data, [0, 1], vision)
    assert shared_prompts(data, [0, 1], [], images) == [(0, 0), (1, 0)]


def test_a_sampled_image_token_is_text(tiny):
    """A response may contain the id of images. It has the embedding of its id, as in the engine."""
    _, _, model, vision = tiny
    data = make_samples(vision, [[(1, 4, 4)]])
    tokens = data["tokens"][0]
    text = logits(model, data, vision)
    tokens[-2] = vision.image_id
    batch = pack(data, [0], [], device="cpu", vision=vision)
    assert len(batch.images.rows) == count_tokens(vision, (1, 4, 4))
    sampled = logits(model, data, vision)
    torch.testing.assert_close(sampled[:-2], text[:-2], rtol=0, atol=1e-6)
    assert (sampled[-2] - text[-2]).abs().max() > 1e-3


def test_bad_images_are_named(tiny):
    _, _, _, vision = tiny
    data = make_samples(vision, [[(1, 4, 4), (1, 4, 8)]]) | {"sample_indices": [7]}
    inputs = data["multimodal_train_inputs"][0]

    def refused(message, **changed):
        with pytest.raises(ValueError, match=message):
            pack(data | {"multimodal_train_inputs": [inputs | changed]}, [0], [], device="cpu", vision=vision)

    if (fixed := vision.tokens_per_image) is not None:
        pixels = inputs["pixel_values"]
        refused(
            f"sample 7 must have {fixed} neighbouring tokens {vision.image_id} for its image 3, got {2 * fixed} such",
            pixel_values=pixels[[0, 1, 1]],
        )
        refused(
            f"an image for each of its {2 * fixed} image tokens, got images for {fixed}",
            pixel_values=pixels[:1],
        )
        return

    def images(*grids):
        patches = sum(height * width for _, height, width in grids)
        pixels = torch.zeros(patches, vision.patch_values)
        return {"image_grid_thw": torch.tensor(grids), "pixel_values": pixels}

    refused(
        "pixel_values must have one row per patch of image_grid_thw, 48, got 47",
        pixel_values=inputs["pixel_values"][1:],
    )
    refused(
        rf"sample 7 must have 12 neighbouring tokens {vision.image_id} for its image 2, got 12 such tokens",
        **images((1, 4, 4), (1, 4, 12)),
    )
    one = images((1, 4, 4))
    refused(
        "the prompt of sample 7 must have an image for each of its 12 image tokens, got images for 4", **one
    )
    with pytest.raises(
        ValueError, match="multimodal_train_inputs of sample 7 must be None for a text model, got dict"
    ):
        pack(data, [0], [], device="cpu")


def test_a_run_without_images_has_no_tower(tiny):
    directory, _, _, vision = tiny
    model = build_model(load_hf_config(directory), make_config())
    assert not [name for name, _ in model.named_parameters() if PREFIX in name]
    with pytest.raises(
        ValueError, match=re.escape("samples must have no images in a run without --multimodal-keys")
    ):
        image_hidden(model, make_samples(vision), vision)


def test_the_tower_is_frozen_by_default(tiny):
    directory, _, _, vision = tiny
    model = with_weights(directory)
    image_hidden(model, make_samples(vision), vision).sum().backward()
    for name, parameter in unwrap(model).named_parameters():
        assert parameter.requires_grad != name.startswith(PREFIX), name
    projector = "multi_modal_projector" if vision.pooled else "merger"
    only = with_weights(directory, only_train_params_name_list=[f"vision_model.{projector}"])
    trained = {name for name, p in unwrap(only).named_parameters() if p.requires_grad}
    assert trained and all(name.startswith(PREFIX + projector) for name in trained)


def test_a_trained_tower_has_gradients_of_0_without_images(tiny):
    """--overlap-grad-reduce waits for the gradient of every parameter in every step."""
    _, _, model, vision = tiny
    model.zero_grad_buffer()
    arrived = []
    inner = unwrap(model)
    hooks = [p.register_hook(lambda grad: arrived.append(grad)) for p in inner.vision_model.parameters()]
    image_hidden(model, make_samples(vision, [[], []]), vision).sum().backward()
    for hook in hooks:
        hook.remove()
    assert len(arrived) == len(hooks) and all(not grad.any() for grad in arrived)


def test_gradients(tiny, tmp_path):
    """The last test, because it replaces the weights of transformers' model by its gradients. The tower is trained.

    Recomputed layers read the rows of images for the first layers in their own backward, so they run here too.
    """
    directory, hf, _, vision = tiny
    data = make_samples(vision)
    found = {}
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for name, flags in (("plain", {}), ("recomputed", recompute)):
        model = with_weights(directory, train_vision=True, overrides=flags)
        sum_loss(logits(model, data, vision), data["tokens"]).backward()
        for parameter in unwrap(model).parameters():
            parameter.data = parameter.main_grad
        found[name] = {name: tensor.clone() for name, tensor in export_hf(model)}
    sum_loss(image_logits(hf, data), data["tokens"]).backward()
    wanted = hf_gradients(hf, tmp_path)
    for of_model in found.values():
        for name, tensor in of_model.items():
            assert_gradients_equal(tensor, wanted[name], name)
