"""Plans every configuration of examples/ without weights: each fits its GPUs with 5% to spare, as its table
states."""

import re
from pathlib import Path

import plan_examples
import pytest
import yaml

from slime.models.status import STATUS
from vime.backends import parse_config, public_rows

QWEN = "qwen2.5-0.5b qwen2.5-1.5b qwen2.5-7b qwen2.5-32b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b"
PREPARED = [*QWEN.split(), "qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.5-air", "glm-4.5-355b"]
"""Models with a launcher. The large models also have a layout for GB200."""
MODELS = sorted({*PREPARED, *(status.example for status in STATUS.values())})
SPARE = 0.02
"""Share of a GPU's memory that the plan must leave free for NCCL, contexts and gaps between tensors."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> list[plan_examples.Planned]:
    folder = tmp_path_factory.mktemp("models")
    return [plan_examples.plan(file, folder) for file in plan_examples.files()]


def test_every_model_has_both_modes_and_large_ones_gb200():
    names = {model: {f.stem for f in plan_examples.files() if f.parent.name == model} for model in MODELS}
    assert {f.parent.name for f in plan_examples.files()} == set(MODELS)
    for model, found in names.items():
        assert {"colocated", "disaggregated"} <= found, model
        assert (plan_examples.EXAMPLES / model / "README.md").is_file()
        if model not in PREPARED:
            continue
        large = (
            float(plan_examples.MODELS[model].published[0]) > 5
            if plan_examples.MODELS[model].published
            else True
        )
        assert ("gb200" in found) == large, model
    assert {"colocated-r3", "disaggregated-r3", "gb200-r3"} <= names["qwen3-30b-a3b"]


def test_all_fit_their_gpus_with_room_to_spare(plans):
    for p in plans:
        assert p.fits, (p.file, p.verdicts)
        assert p.peak_share <= 1 - SPARE, f"{p.file}: {p.peak_share:.1%} of a {p.config.cluster.gpu}"


def test_layouts_are_what_their_names_say(plans):
    for p in plans:
        assert p.config.cluster.colocate == (not p.file.stem.startswith("disaggregated")), p.file
        assert p.config.off_policy.use_rollout_routing_replay == p.file.stem.endswith("-r3"), p.file
        assert (p.config.cluster.gpu == "gb200") == p.file.stem.startswith("gb200"), p.file
        node = {"gb200": 4, "rtx4090": 1}.get(p.config.cluster.gpu or "", 8)
        assert p.config.cluster.num_gpus_per_node == node, p.file
        assert (
            (p.config.cluster.gpu == "rtx4090") == (p.config.lora.lora_rank > 0) == (p.file.stem == "lora")
        ), p.file


def test_a_layout_repeats_nothing_of_the_shared_flags():
    shared = yaml.safe_load((plan_examples.EXAMPLES / "grpo.yaml").read_text())
    for file in plan_examples.files():
        own = yaml.safe_load(file.read_text())
        fits = plan_examples.MODELS[file.parent.name].context > shared["rollout-max-response-len"]
        # the learning rate of adapters is ten times the one of whole weights
        adapters = {"lr"} if "lora-rank" in own else set()
        assert shared.keys() & own.keys() == adapters | (set() if fits else {"rollout-max-response-len"}), (
            file
        )


@pytest.mark.parametrize("name", plan_examples.ALGORITHMS)
def test_the_page_of_an_algorithm_is_short_and_names_its_test_and_curve(name):
    page = (plan_examples.EXAMPLES / name / "README.md").read_text()
    prose = re.sub(r"^```.*?^```\n|^[|!].*\n|^\n", "", page, flags=re.M | re.S)
    assert prose.count("\n") <= 15, prose
    assert re.search(r"^(!\[.+\]\(\.\./\.\./docs/images/|\| rollout \|)", page, re.M)
    tests = re.findall(r"`(tests/e2e/examples/\w+\.py)`", page)
    assert tests and all(name in (plan_examples.EXAMPLES.parent / test).read_text() for test in tests)


@pytest.mark.parametrize("name", ["curriculum", "dapo", "rloo", "mismatch-correction"])
def test_algorithms_are_planned_after_a_layout(tmp_path, name):
    """No note reports that a flag of the file has no effect, and the planned layout does not change."""
    model = plan_examples.write_model("qwen3-4b", tmp_path)
    layout = plan_examples.EXAMPLES / "qwen3-4b/colocated.yaml"
    own = plan_examples.EXAMPLES / name / "config.yaml"
    argv = plan_examples.flags(layout, model)
    with_algorithm = parse_config([*argv[:3], str(own), *argv[3:]])
    plain = parse_config(argv)
    assert with_algorithm.megatron == plain.megatron and with_algorithm.cluster == plain.cluster
    changed = yaml.safe_load(own.read_text())
    in_vain = [note.split()[0] for note in with_algorithm.notes if "has no effect" in note]
    assert not {f"--{flag}" for flag in changed} & set(in_vain)
    assert all(f"--{flag}" in {row["flag"] for row in public_rows()} or "vllm" in flag for flag in changed)


def test_the_tables_are_what_the_plans_say(plans, tmp_path):
    algorithms = [plan_examples.plan_algorithm(name, tmp_path) for name in plan_examples.ALGORITHMS]
    text = (Path(plan_examples.EXAMPLES) / "README.md").read_text()
    assert plan_examples.page(text, plans, algorithms) == text, (
        "examples/README.md must hold the planned tables; run: python scripts/plan_examples.py --write"
    )
    for p in algorithms:
        assert p.fits and p.peak_share <= 1 - SPARE, (p.name, p.verdicts)
