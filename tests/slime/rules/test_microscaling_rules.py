"""Tests the rules of MXFP8 and NVFP4: a plan accepts them, a run does not start."""

from __future__ import annotations

import json

import pytest
from config_cases import good_argv, write_model

from slime.plan.memory_estimate import estimate
from slime.plan.rounded_operands import BLOCKS, MXFP8, NVFP4, form_for
from slime.rules import parse_args
from slime.rules.precision.microscaling import require_kernels

MX = "--fp8-format e4m3 --fp8-recipe mxfp8"
NV = "--fp4-format e2m1 --fp4-recipe nvfp4"
ON_B200 = "--device cuda --bf16 --gpu b200 --max-tokens-per-gpu 4096 --use-dynamic-batch-size"


def argv(folder, flags, **shape):
    words = good_argv(folder)
    write_model(folder / "model", **shape)
    return [*words, *flags.split()]


def test_the_flags_select_a_form() -> None:
    assert form_for({"fp8": "e4m3", "fp8_recipe": "mxfp8"}) is MXFP8
    assert form_for({"fp8": "e4m3", "fp8_recipe": "blockwise"}) is BLOCKS
    assert form_for({"fp4": "e2m1"}) is NVFP4
    assert form_for({"fp8_recipe": "mxfp8"}) is form_for({"fp8": "hybrid"}) is form_for({}) is None
    assert (MXFP8.bytes, NVFP4.bytes, BLOCKS.bytes) == (1.03125, 0.5625, 1.03125)


def test_a_plan_counts_the_rounded_operands(tmp_path) -> None:
    """4096 tokens, hidden 128, intermediate 384: the gradient of gate and up in two directions, the input, and the
    weight."""
    found = {}
    for flags in ("", MX, NV):
        config = parse_args(argv(tmp_path, f"{ON_B200} {flags}"))
        hf = json.loads((tmp_path / "model/config.json").read_text())
        work = {item.name: item for item in estimate(config, hf).work}
        found[flags] = work["layers, backward"]
    elements = 4096 * (2 * 768 + 128) + 768 * 128
    for flags, each, name in ((MX, 1.03125, "MXFP8"), (NV, 0.5625, "NVFP4")):
        assert found[flags].bytes - found[""].bytes == pytest.approx(elements * each)
        assert found[flags].arithmetic.endswith(f"of operands in {name}")


@pytest.mark.parametrize(
    ("flags", "shape", "message"),
    [
        (f"{MX} --gpu h200", {}, "--fp8-recipe must be left out on GPUs without MXFP8, got mxfp8 with --gpu h200; "),
        (f"{NV} --gpu h100", {}, "--fp4-format must be left out on GPUs without NVFP4, got e2m1 with --gpu h100; "),
        (f"{NV} {MX}", {}, "--fp8-format must be left out with --fp4-format e2m1, got e4m3; choose one"),
        ("--fp8-format hybrid --fp8-recipe mxfp8", {}, "--fp8-format must be e4m3 with --fp8-recipe mxfp8, got hyb"),
        ("--fp8-recipe mxfp8", {}, "--fp8-format must be e4m3 with --fp8-recipe mxfp8, got none; give"),
        (f"{NV} --fp4-param-gather", {}, "must be left out with --fp4-format e2m1, got it; leave it out: the weights"),
        (f"{MX} --fp8-param-gather", {}, "must be left out with --fp8-recipe mxfp8, got it; leave it out"),
        (MX, {"intermediate_size": 400}, "intermediate_size of --hf-checkpoint must be a multiple of 32 .*, got 400;"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_in_one_line(tmp_path, flags, shape, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse_args(argv(tmp_path, f"--device cuda --bf16 {flags}", **shape))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("flags", "flag"), [(MX, "--fp8-recipe"), (NV, "--fp4-format")])
def test_a_run_does_not_start(tmp_path, flags, flag) -> None:
    config = parse_args(argv(tmp_path, f"{ON_B200} {flags}"))
    with pytest.raises(
        ValueError, match=f"{flag} must be left out in a run, because this version has no kernels"
    ):
        require_kernels(config)
    require_kernels(parse_args(argv(tmp_path, ON_B200)))
