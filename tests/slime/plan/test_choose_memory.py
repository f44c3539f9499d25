"""Tests a launcher's choices that make a run fit the existing cards and the host, and the errors for a run that does
not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from memory_cases import FULL, QWEN3_4B, config
from test_measured_memory import FOUR, HOST, QWEN3_30B

from slime.checkpoints.hf_config import require_weight_files
from slime.config import Config
from slime.plan.fit import MachineSizes
from slime.plan.units import GIB
from slime.rules.experts import check_expert_layout
from vime.memory.choose import CARD, Chosen, choose, light_config, main, read_number
from vime.memory.lines import require_fit, whole_fit
from vime.vllm.backend import FLAG_NAMES, engine_facts

H200, H100 = MachineSizes(139.8 * GIB, HOST), MachineSizes(79.18 * GIB, HOST)
ALONE = {**FOUR, "tensor_model_parallel_size": 1, "sequence_parallel": False}
"""Sizes per rank: each rank has the whole attention, and a quarter of the experts."""
TWO = {
    **ALONE,
    "actor_num_gpus_per_node": 2,
    "num_gpus_per_node": 2,
    "expert_model_parallel_size": 2,
    "engine_facts": engine_facts({"gpu_memory_utilization": 0.45}),
}
SMALL_HOST = MachineSizes(139.8 * GIB, 250 * GIB)
WITH_SUMS = (
    "with --grad-reduce-in-bf16, which sums the gradients of micro-batches in bfloat16, the launcher finds flags "
    "that fit"
)

REMAINDERS = "use_precision_aware_optimizer"


def chosen_values(c: Config, found: Sequence[Chosen], least_share: float = 0.4) -> dict[str, Any]:
    """Returns the values of the flags, and checks the reasons and that the engine's share has room for its weights."""
    values: dict[str, Any] = {}
    for one in found:
        assert "too much for " in one.why
        words = one.flag.replace("--", "").replace("-", "_").split()
        if words[0] == "optimizer_cpu_offload":
            values |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": float(words[2])}
        elif words[0] == REMAINDERS:
            values[words[0]] = True
        elif words[0] == FLAG_NAMES["memory_share"].replace("--", "").replace("-", "_"):
            share = float(words[1])
            # the share contains 28.4 GiB of weights
            assert c.engine.engine_facts.memory_share > share >= least_share
            values["engine_facts"] = engine_facts({"gpu_memory_utilization": share})
        else:
            values[words[0]] = int(words[1])
    return values


@pytest.mark.parametrize(
    ("layout", "machine", "fraction", "without", "remainders"),
    [
        (FOUR, H200, 0, 0.1, True),
        (FOUR, H100, 0.8, 0.8, False),
        (ALONE, H200, 0.1, 0.2, True),
        (ALONE, H100, 0.9, 0.9, True),
    ],
    ids=["TP4-H200", "TP4-H100", "TP1-H200", "TP1-H100"],
)
def test_the_30b_runs_on_four_cards(layout, machine, fraction, without, remainders):
    """With the launcher's choices the run fits with a margin, and the choices are equal each time. With remainders as
    main weights, the part of Adam on the host is at most `without`, the part with main weights of 32 bits."""
    c = config(**layout)
    found = choose(c, QWEN3_30B, machine, set())
    assert found == choose(c, QWEN3_30B, machine, set()) and found
    values = chosen_values(c, found)
    small = MachineSizes(CARD * machine.device, machine.host)
    assert whole_fit(c.with_values(**values), QWEN3_30B, small).over <= 0
    assert whole_fit(c, QWEN3_30B, small).over > 0
    assert values.get("optimizer_offload_fraction", 0) == fraction
    if fraction:
        less = {**values, "optimizer_offload_fraction": fraction - 0.1, REMAINDERS: True}
        assert whole_fit(c.with_values(**less), QWEN3_30B, small).over > 0
    assert (REMAINDERS in values) == remainders
    if remainders:
        assert whole_fit(c.with_values(**{**values, REMAINDERS: False}), QWEN3_30B, small).over > 0
    for given in (REMAINDERS, f"no_{REMAINDERS}"):
        kept = chosen_values(c, choose(c, QWEN3_30B, machine, {given}))
        assert REMAINDERS not in kept and kept["optimizer_offload_fraction"] == without


def test_a_flag_of_the_user_is_kept_and_the_rest_is_chosen():
    found = choose(config(**FOUR), QWEN3_30B, H100, {"max_tokens_per_gpu", "rl_kernel_workspace_mib"})
    assert found and found[0].flag.startswith("--optimizer-cpu-offload --optimizer-offload-fraction 0.")
    assert not any("tokens" in one.flag or "workspace" in one.flag for one in found)
    with pytest.raises(
        ValueError, match=r"^the run must fit this machine, got 1\d\d\.\d\d GiB while it trains, "
    ):
        choose(config(**FOUR), QWEN3_30B, H100, {"optimizer_offload_fraction"})


def test_the_30b_on_two_cards_needs_sums_in_bfloat16():
    """The launcher does not choose this flag, because the flag changes the results. The error names the flag, unless
    the user has chosen the dtype of the sums."""
    with pytest.raises(
        ValueError, match=r"^the run must fit this machine, got \d+\.\d\d GiB while it "
    ) as caught:
        choose(config(**TWO), QWEN3_30B, SMALL_HOST, set())
    assert str(caught.value).endswith(f"; {WITH_SUMS}: add this flag or use larger GPUs and hosts")
    c = config(**TWO, overrides={**FULL, "grad_reduce_in_fp32": False})
    found = choose(c, QWEN3_30B, SMALL_HOST, {"grad_reduce_in_bf16"})
    values = chosen_values(c, found, least_share=0.25)
    assert values["optimizer_offload_fraction"] == 0.6 and values[REMAINDERS]
    assert found[0].why.startswith("with 0.5 the run needs ")
    assert found[-1].why.startswith("without it the run needs ")
    assert whole_fit(c.with_values(**values), QWEN3_30B, SMALL_HOST).over <= 0
    assert not any("grad-reduce" in one.flag for one in found)
    for name in ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32", "no_grad_reduce_in_fp32"):
        with pytest.raises(ValueError, match=r"; give others or use larger GPUs and hosts: ") as caught:
            choose(config(**TWO), QWEN3_30B, SMALL_HOST, {name})
        assert WITH_SUMS not in str(caught.value)


def test_nothing_is_chosen_where_a_run_fits_or_nothing_is_known():
    assert choose(config(max_tokens_per_gpu=8192), QWEN3_4B, H200, set()) == []
    assert choose(config(**FOUR), QWEN3_30B, MachineSizes(), set()) == []


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (MachineSizes(24 * GIB, HOST), r"too much for a GPU of 24 GiB; "),
        (MachineSizes(139.8 * GIB, 100 * GIB), r"too much for a host of 100 GiB"),
    ],
    ids=["card", "host"],
)
def test_a_machine_that_is_too_small_is_refused_before_anything_starts(machine, said):
    with pytest.raises(ValueError, match=said) as caught:
        require_fit(config(**FOUR), QWEN3_30B, machine)
    assert "change flags or use larger GPUs and hosts: " in str(caught.value)
    with pytest.raises(ValueError, match=r"^the run must fit this machine, got "):
        choose(config(**FOUR), QWEN3_30B, MachineSizes(24 * GIB, HOST), set())
    require_fit(config(max_tokens_per_gpu=8192), QWEN3_4B, H200)


def test_half_a_model_on_disk_is_refused(tmp_path):
    """The model has its index and no file of weights. If some files exist, a rule of the flags names the first
    missing file (`check_checkpoint_shapes`)."""
    require_weight_files(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"got none of 2, such as model-00001-of-00002.safetensors, in .*; download"
    ):
        require_weight_files(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    require_weight_files(tmp_path)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match=r"--expert-model-parallel-size must divide the 128 experts of a layer, got 3"
    ):
        check_expert_layout(config(**{**FOUR, "expert_model_parallel_size": 3}), 128)


def test_the_command_prints_flags_and_reasons(tmp_path, capsys):
    """The engine's flags count without its parser, whose import takes seconds."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"vocab_size": 151936}))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    flags = f"""--run --device cuda --hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1
    --rm-type gsm8k --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --rollout-batch-size 32
    --n-samples-per-prompt 8 --rollout-max-response-len 256 --use-dynamic-batch-size --max-tokens-per-gpu 16384
    --vllm-gpu-memory-utilization 0.4 --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 -- --host-memory-gib 503"""
    assert main([*flags.split(), "--gpu-memory-gib", "70"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("--optimizer-cpu-offload --optimizer-offload-fraction 0.")
    assert said.err.startswith("memory: --optimizer-cpu-offload --optimizer-offload-fraction 0.")
    assert main([*flags.split(), "--gpu-memory-gib", "8"]) == 2
    assert capsys.readouterr().err.startswith("vime train: the run must fit this machine, got ")
    assert main(["--plan", *flags.split()[1:], "--gpu-memory-gib", "8"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "value"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5g", 1_500_000_000), ("-1", -1)]
)
def test_numbers_of_the_engine_are_read_as_vllm_reads_them(text, value):
    assert read_number(text) == value


def test_the_engines_step_is_read_without_its_parser(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    c = light_config(
        f"""--device cuda --hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1 --rm-type gsm8k
        --rollout-num-gpus 1 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 512
        --vllm-max-num-seqs 64 --vllm-max-num-batched-tokens=4K --vllm-max-model-len auto""".split()
    )
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    assert [c.engine.backend_args.get(name) for name in names] == [64, 4096, None]


def test_a_plan_names_the_flag_with_which_the_launcher_finds_flags(tmp_path, capsys):
    """The plan itself has only advice for single flags, so the command prints the flag on standard error."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    flags = f"""--device cuda --gpu h200 --hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1
    --rm-type gsm8k --actor-num-gpus-per-node 2 --num-gpus-per-node 2 --colocate --rollout-batch-size 32
    --n-samples-per-prompt 8 --rollout-max-response-len 512 --use-dynamic-batch-size --max-tokens-per-gpu 20480
    --rollout-num-gpus-per-engine 2 --expert-model-parallel-size 2 --vllm-gpu-memory-utilization 0.45
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --
    --host-memory-gib 250""".split()
    assert main(["--plan", *flags]) == 0
    assert capsys.readouterr() == ("", f"memory: no choice of flags fits; {WITH_SUMS}: add this flag\n")
    assert main(["--plan", *flags, "--accumulate-allreduce-grads-in-fp32"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["--plan", *flags, "--grad-reduce-in-bf16"]) == 0
    out, err = capsys.readouterr()
    assert (
        out.startswith("--optimizer-cpu-offload --optimizer-offload-fraction 0.6 ") and WITH_SUMS not in err
    )


def test_a_run_is_fitted_to_the_gpus_that_are_here(tmp_path, capsys, monkeypatch):
    """The layout's --gpu names the GPU that the layout was made for: a plan uses it, and a run does not."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"vocab_size": 151936}))
    (tmp_path / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    flags = f"""--device cuda --gpu h200 --hf-checkpoint {tmp_path} --prompt-data {tmp_path}/p.jsonl --num-rollout 1
    --rm-type gsm8k --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --colocate --rollout-batch-size 32
    --n-samples-per-prompt 8 --rollout-max-response-len 256 --use-dynamic-batch-size --max-tokens-per-gpu 16384
    --vllm-gpu-memory-utilization 0.4 -- --host-memory-gib 503""".split()
    monkeypatch.setattr("vime.memory.sizes.device_memory", lambda c: int(79.18 * GIB))
    assert main(["--run", *flags]) == 0
    assert "too much for a GPU of 76.8 GiB" in capsys.readouterr().err
    assert main(["--plan", *flags]) == 0
    assert "76.8 GiB" not in capsys.readouterr().err
    monkeypatch.setattr("vime.memory.sizes.device_memory", lambda c: None)  # a driver's host without a GPU
    assert main(["--run", *flags]) == 0
    assert "76.8 GiB" not in capsys.readouterr().err


def test_a_long_sequence_that_does_not_fit_is_an_error_before_the_start():
    """An H100 trains samples of 8,192 tokens. The advice for samples of 524,288 tokens has context parallelism."""
    machine = MachineSizes(79.18 * GIB, 2000 * GIB)
    alone = {"debug_train_only": True, "colocate": False, "rollout_num_gpus": 0, "actor_num_gpus_per_node": 8}
    require_fit(config(**alone, rollout_max_response_len=8192, max_tokens_per_gpu=8192), QWEN3_4B, machine)
    with pytest.raises(ValueError, match=r"^the run must fit this machine, got .*--context-parallel-size \d"):
        require_fit(
            config(**alone, rollout_max_response_len=524288, max_tokens_per_gpu=8192), QWEN3_4B, machine
        )
