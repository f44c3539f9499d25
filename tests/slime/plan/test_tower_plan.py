"""Compares the plan's parameters and FLOPs of vision towers with transformers' towers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from memory_cases import config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vision_architectures import VISION_ARCHITECTURES, WITHOUT_TOWER

from slime.config import Config
from slime.megatron_backend.model.vision.towers import TOWERS
from slime.models import read_decoder
from slime.models.vision import Vision
from slime.plan.host_phases import host_sum, image_item
from slime.plan.memory_estimate import activation_memory, estimate
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params
from slime.plan.tower import CACHE_BYTES, tower_flops, tower_params, tower_token_flops
from slime.plan.units import amount
from vime.plan.hardware import hardware

KEYS = {"multimodal_keys": {"image": "images"}}


def config_json(name: str) -> dict[str, object]:
    row = VISION_ARCHITECTURES[name]
    fields = row.config_fields()
    return {"model_type": row.family, **fields["text_config"], **fields}


@pytest.mark.parametrize("name", sorted(VISION_ARCHITECTURES.keys() - WITHOUT_TOWER))
def test_parameters_and_flops_are_those_of_the_modules(name: str) -> None:
    vision = read_decoder(config_json(name)).vision
    assert isinstance(vision, Vision)
    with torch.device("meta"):
        whole = TOWERS[vision.kind].build(vision)
    tables = ("pos_embed", "position_embedding")  # not products
    matrices = [
        p for n, p in whole.named_parameters() if p.dim() > 1 and not any(name in n for name in tables)
    ]
    assert sum(p.numel() for p in matrices) == tower_params(vision)
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
    sizes |= {"out_hidden_size": 80, "depth": 2}
    if vision.tokens_per_image is not None:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    layers = {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0] * bool(vision.deepstack)}
    small = replace(
        vision,
        **{"hidden": 64, "ffn": 96, "heads": 4, "out": 80, "depth": 2},
        whole_layers=1,
        mergers=1 + bool(vision.deepstack),
        settings={**vision.settings, **sizes, **layers},
    )
    grid, tower = (1, 16, 32), TOWERS[vision.kind].build(small)
    inputs = {"pixel_values": torch.zeros(512, vision.patch_values), "image_grid_thw": torch.tensor([grid])}
    if vision.tokens_per_image is not None:
        grid, inputs = (1, 64, 64), TOWERS[vision.kind].smallest(small)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        TOWERS[vision.kind].run(tower, inputs)
    assert tower_flops(small, [grid]) == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_a_run_with_images_has_the_tower_on_the_first_stage() -> None:
    hf = config_json("qwen3-vl-4b")
    vision = read_decoder(hf).vision
    assert vision is not None

    def held(trained: bool = False, **flags: object) -> float:
        return sum(
            params for _, params, *_ in rank_params(Config.from_flat(flags), Shape.of(hf), trained=trained)
        )

    without = held()
    assert held(**KEYS) - without == tower_params(vision)
    assert held(trained=True, **KEYS) == without  # frozen by default
    assert held(trained=True, train_vision=True, **KEYS) - without == tower_params(vision)
    text, frozen, trained = (
        activation_memory(Config.from_flat({"params_dtype": "bfloat16"} | flags), Shape.of(hf), 1024)[0].bytes
        for flags in ({}, KEYS, KEYS | {"train_vision": True})
    )
    assert frozen - text == 4 * 1024 * vision.patch_values * 4  # four patches per token, in float32
    assert trained - frozen == 4 * 1024 * vision.depth * (10 * 1024 + 2 * 4096) * 2


def test_the_host_has_the_files_of_the_images_in_flight() -> None:
    flags = {"rollout_batch_size": 250, "max_staleness": 3}
    item = image_item(Config.from_flat(flags | KEYS))
    assert item.bytes == 1000 * 2**19
    assert item.arithmetic == f"1000 prompts in flight x {amount(2**19)} of a file"
    assert image_item(Config.from_flat(flags)).bytes == 0


def test_the_trainers_keep_the_rows_of_images() -> None:
    hf = config_json("qwen3-vl-4b")

    def kept_bytes(**flags: object) -> float:
        c = config(actor_num_gpus_per_node=2, **flags)
        found = host_sum([(c, estimate(c, hf), ())]).items
        return sum(item.bytes for item in found if item.name == "rows of images")

    assert kept_bytes(**KEYS) == 2 * CACHE_BYTES
    assert kept_bytes() == 0


@pytest.mark.parametrize("trained", [False, True])
def test_the_plan_has_a_bound_for_the_tower(trained: bool) -> None:
    hf = config_json("qwen3-vl-4b")
    vision = read_decoder(hf).vision
    assert vision is not None
    lines = list(hardware(config(gpu="h100", params_dtype="bfloat16", train_vision=trained, **KEYS), hf))
    flops = tower_token_flops(vision) * (3 if trained else 1)
    assert (
        sum(f"upper bound of the vision tower: {flops / 1e9:.3g} GFLOP a token" in line for line in lines)
        == 1
    )
    # per frame, the patches of 16 x 16 have attention in addition
    assert tower_flops(vision, [(1, 16, 16)]) > 64 * tower_token_flops(vision)
    text = hardware(config(gpu="h100", params_dtype="bfloat16"), hf)
    assert not any("vision tower" in line for line in text)
