"""Tests that files of slime's and upstream vime's users import: `upstream_imports.txt` has the names, which work or are
refused in one line."""

from __future__ import annotations

import asyncio
import importlib
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rollout_double import ListSource, make_args, make_state, write_lines

from slime.hooks import load_function
from slime.protocols import DataSource
from slime.rollout.base_types import iter_samples
from slime.rollout.rm_hub.math_utils import last_boxed_only_string, remove_boxed
from slime.rollout.sglang_rollout import eval_rollout, generate_rollout_async
from slime.system.upstream import REFUSED, RefusedName
from slime.types import Sample
from slime.utils.async_utils import get_async_loop, run
from slime.utils.http_utils import find_available_port, get_rollout_num_engines, is_port_available
from slime.utils.misc import get_free_port, should_run_periodic_action
from slime.utils.ppo_utils import (
    compute_entropy_from_logits,
    compute_gspo_kl,
    compute_log_probs,
    compute_opsm_mask,
    get_grpo_returns,
)

LINES = [
    line
    for line in (Path(__file__).parent / "upstream_imports.txt").read_text().splitlines()
    if not line.startswith("#")
]


def renamed(module: str) -> str:
    """The name of slime's module in upstream vime."""
    return module.replace("slime.", "vime.", 1).replace("rollout.sglang_", "rollout.vllm_")


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()[:2]))
def test_a_name_works_or_is_refused(line: str) -> None:
    path, outcome, *names = line.split()
    module = importlib.import_module(path)
    for name in names:
        found = getattr(module, name)
        assert isinstance(found, RefusedName) == (outcome == "refuses"), name
        if outcome == "refuses":
            with pytest.raises(
                ValueError, match=rf"{name} must not be used in vime, got a call; .{{20}}"
            ) as raised:
                found("anything", 1)
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()[:2]))
def test_upstream_vime_has_the_names_under_its_own(line: str) -> None:
    path, _, *names = line.split()
    if path.startswith("slime.router"):
        return  # upstream vime has no such package
    assert vars(importlib.import_module(renamed(path))) is vars(importlib.import_module(path)), names


def test_the_list_has_every_refused_name() -> None:
    """A path of plug_ins has the names of the modules that mean it."""
    listed = {
        line.split()[0].removeprefix("slime."): line.split()[2:] for line in LINES if " refuses " in line
    }
    assert {
        path: names.split() for path, (names, _) in REFUSED.items() if not path.startswith("plug_ins.")
    } == {path: names for path, names in listed.items() if path in REFUSED}


def test_a_file_that_imports_internals_loads_until_it_uses_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime.backends.sglang_utils.sglang_config import SglangConfig\n"
        "from vime.ray.placement_group import create_placement_groups\n"
        "from slime.ray.rollout import RolloutManager\n"
        "import slime.utils.arguments as arguments\n"
        "def note(config: SglangConfig | None = None) -> None: ...\n"
        "def score(args, sample):\n    return 1.0\n"
        "def server(args):\n    return SglangConfig.from_yaml(args)\n"
        "def manager(args):\n    return RolloutManager.options(num_cpus=1).remote(args)\n"
        "def main():\n    return create_placement_groups(arguments.parse_args())\n"
    )
    assert load_function(f"{file}:score")(None, None) == 1.0
    for name, said in {
        "server": r"sglang_utils\.sglang_config\.SglangConfig\.from_yaml must not be used .* vime starts",
        "manager": r"slime\.ray\.rollout\.RolloutManager\.options must not be used .* `vime train` places",
        "main": r"slime\.utils\.arguments\.parse_args must not be used .* `vime train` parses the flags",
    }.items():
        with pytest.raises(ValueError, match=said):
            load_function(f"{file}:{name}")(*([None] if name != "main" else []))
    derived = tmp_path / "derived.py"
    derived.write_text("from slime.ray.train_actor import TrainRayActor\nclass Mine(TrainRayActor): ...\n")
    said = (
        r"--custom-rm-path .*TrainRayActor must not be used in vime, got a derived class; `vime train` places"
    )
    with pytest.raises(ValueError, match=said):
        load_function(f"{derived}:Mine", flag="--custom-rm-path")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("slime.rollout.forge_load.generate_rollout", "--load-debug-rollout-data trains on saved rollouts"),
        ("vime.rollout.forge_load.generate_rollout", "--load-debug-rollout-data trains on saved rollouts"),
        ("slime.router.router.SlimeRouter", "the router of the run takes the requests"),
    ],
)
def test_a_hook_that_is_refused_is_an_error_of_the_start(path: str, said: str) -> None:
    with pytest.raises(
        ValueError, match=f"--x-path must name a function that vime has, got '{path}'.*{said}"
    ):
        load_function(path, flag="--x-path")


def test_unknown_modules_and_names_stay_errors() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime.backends.sglang_utils.nothing")
    for line in ("from slime.utils.arguments import nothing", "from slime.utils.misc import nothing"):
        with pytest.raises(ImportError, match="cannot import name 'nothing'"):
            exec(line)


def test_importing_slime_stays_light() -> None:
    code = "import sys, slime; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'ray')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_ports_of_this_host() -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_port_available(port)
        found = find_available_port(port)
        assert found > port and is_port_available(found)
        assert get_free_port(port, consecutive=2) > port
    with pytest.raises(ValueError, match="start_port must be below 2 consecutive free ports, got 65535"):
        get_free_port(65535, consecutive=2)
    assert get_rollout_num_engines(SimpleNamespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)) == 4


@pytest.mark.parametrize(
    ("call", "due"),
    [((0, None), False), ((4, 5), True), ((3, 5), False), ((3, 5, 2), True), ((3, 5, None, 4), True)],
)
def test_periodic_actions(call: tuple[int, ...], due: bool) -> None:
    assert should_run_periodic_action(*call) is due


def test_balanced_parts_and_whitened_values() -> None:
    balancing = importlib.import_module("slime.utils.seqlen_balancing")
    parts = balancing.get_seqlen_balanced_partitions([9, 1, 5, 5, 4, 6], 3, equal_size=True)
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert [sum([9, 1, 5, 5, 4, 6][i] for i in part) for part in parts] == [10, 10, 10]
    with pytest.raises(
        ValueError, match="k_partitions must be between 1 and the number of lengths, got 3 for 2"
    ):
        balancing.get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    groups = importlib.import_module("slime.utils.distributed_utils")
    values, mask = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 1.0, 0.0])
    white = groups.distributed_masked_whiten(values, mask)
    torch.testing.assert_close(white, torch.tensor([-(0.5**0.5), 0.5**0.5, 0.0]))
    with pytest.raises(ValueError, match="get_gloo_group must be called on a trainer rank"):
        groups.get_gloo_group()


def test_functions_of_log_probs_by_hand() -> None:
    logits, tokens = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1, 1])
    table = torch.log_softmax(logits, -1)
    torch.testing.assert_close(compute_log_probs(logits, tokens, None), table[[0, 1], tokens])
    found = compute_log_probs(logits[:, None], tokens[:, None], None)
    torch.testing.assert_close(found, table[[0, 1], tokens][:, None])
    torch.testing.assert_close(compute_entropy_from_logits(logits, None), -(table.exp() * table).sum(-1))
    new, old = [torch.tensor([0.0, -1.0, -5.0]), torch.tensor([-2.0])], [torch.zeros(3), torch.tensor([-1.0])]
    masks = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0])]
    assert compute_gspo_kl(new, old, new, masks).tolist() == [0.5, 0.5, 0.5, 1.0]
    advantages = [torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([1.0])]
    keep, dropped = compute_opsm_mask(SimpleNamespace(opsm_delta=0.4), new, old, advantages, masks)
    assert keep.tolist() == [0.0, 0.0, 0.0, 1.0] and dropped.item() == 1.5
    returns = get_grpo_returns(torch.tensor([2.0, -1.0]), new)
    assert [r.tolist() for r in returns] == [[2.0, 2.0, 2.0], [-1.0]]


def test_boxes_and_samples() -> None:
    text = r"first \boxed{1}, then \boxed{\frac{1}{2}} and no more"
    assert last_boxed_only_string(text) == r"\boxed{\frac{1}{2}}"
    assert remove_boxed(last_boxed_only_string(text)) == r"\frac{1}{2}"
    assert last_boxed_only_string(r"\boxed 5.") == r"\boxed 5" and last_boxed_only_string(r"\boxed{1") is None
    with pytest.raises(ValueError, match="s must have a box"):
        remove_boxed("5")
    one, two = Sample(index=1), Sample(index=2, status=Sample.Status.ABORTED)
    assert [s.index for s in iter_samples([[one, two], [[two], [one]], one])] == [1, 2, 2, 1, 1]


def test_parameters_of_vllms_generate_route() -> None:
    """Upstream vime's examples build the body of /inference/v1/generate with these two functions."""
    module = importlib.import_module("vime.rollout.vllm_rollout")
    state = make_state(make_args(rollout_stop=["\n"], rollout_stop_token_ids=[]))
    found = module._build_inference_sampling_params({**state.sampling_params, "max_new_tokens": 7, "seed": 3})
    assert found["max_tokens"] == 7 and found["logprobs"] == 1 and found["seed"] == 3
    assert found["stop"] == ["\n"] and found["include_stop_str_in_output"] and "stop_token_ids" not in found
    with pytest.raises(ValueError, match="sampling_params must be among .*, got \\['heat'\\]"):
        module._build_inference_sampling_params({"heat": 1})
    ids = module._coerce_flat_int_token_ids([[1, 2], torch.tensor([3]), (4,)])
    assert ids == [1, 2, 3, 4] and module._coerce_flat_int_token_ids(None) == []
    with pytest.raises(ValueError, match="ids must be token ids, got the text 'ab'"):
        module._coerce_flat_int_token_ids("ab")


async def length_reward(args: object, sample: Sample, **kwargs: object) -> float:
    return float(sample.response_length)


def test_a_rollout_function_awaits_the_default_ones(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "q"}])
    args = make_args(custom_rm_path="test_upstream_imports.length_reward", eval_prompt_data=["set", rows])
    state = make_state(args)
    source: DataSource = ListSource(args, ["q", "r", "s", "t"])
    output, aborted = run(generate_rollout_async(args, 0, source.get_samples))
    assert len(output.samples) == args.rollout_batch_size and aborted == []
    assert all(s.reward > 0 for group in output.samples for s in group)
    with pytest.raises(ValueError, match="data_source must have get_samples and add_samples, got function"):
        run(generate_rollout_async(args, 1, lambda n: []))
    evaluated, rest = get_async_loop().run(eval_rollout(args, 0))
    assert len(evaluated.data["set"]["rewards"]) == args.n_samples_per_eval_prompt and rest == []
    assert get_async_loop().loop is state.loop
    state.close()


def test_the_loop_of_a_process_without_a_rollout() -> None:
    loop = get_async_loop()
    later = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "done"), loop.loop)
    assert later.result(5) == "done" and loop.run(asyncio.sleep(0, 3)) == 3
