"""Gives launch scripts of slime and upstream vime, as they stand, to `vime plan`: the plan accepts a script, or refuses
it in one line per problem.

`slime_launches.toml` has the flags and values of the scripts. The test makes small stand-ins for the files that they
name: config.json from the model's facts, a tokenizer, rows of prompts, modules of hooks, converted checkpoints.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from rollout_double import make_tokenizer
from safetensors.torch import save_file
from vision_cases import draw_image, write_processor

from slime.plug_ins.media import encode_image_for_rollout_engine
from vime.backends import parse_config
from vime.cli import main

ROOT = Path(__file__).parents[3]
DATA = tomllib.loads(Path(__file__).with_name("slime_launches.toml").read_text())
SCRIPTS: dict[str, dict[str, Any]] = {script["name"]: script for script in DATA["scripts"]}
TURNS_OF_FSDP = "examples/geo3k_vlm_multi_turn/run_geo3k_vlm_multi_turn.py without SLIME_SCRIPT_TRAIN_BACKEND"
REFUSED = {
    "examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh": [
        "--pipeline-model-parallel-size must deal the model's layers out equally, got 2 stages for 47 layers"
    ],
    TURNS_OF_FSDP: [
        "--train-backend must be one of megatron, got fsdp; give megatron, or leave the flag out",
        r"2 settings of other trainers must be flags of vime, .*",
    ],
    "examples/on_policy_distillation/run-qwen3-8B-opd.sh": [
        "--advantage-estimator must be one of .*, got on_policy_distillation; give grpo with --use-opd"
    ],
    "examples/reproducibility/run-qwen2.5-0.5B-gsm8k.sh": [
        "--n-samples-per-prompt must be above 1 with --advantage-estimator grpo, got 1"
    ],
    "scripts/low_precision/run-qwen3-4b-fp8.sh": [
        "--load must name a folder that exists, or that of --save, got .*/qwen3-4b_cp8_fp8"
    ],
    "scripts/run-deepseek-r1.sh": [
        "--rollout-num-gpus-per-engine must leave whole blocks of 128 of fp8 .* use 16"
    ],
    "scripts/run-gemma4-26B-A4B-gsm8k.sh": [
        "--custom-model-provider-path must be left out in this version",
    ],
    "scripts/run-gpt-oss-20B.sh": [
        r"--sglang-dp-attention must be left out: .* did you mean --sglang-enable-dp-attention\?",
        "--sglang-tp must be left out; GPUs of one engine: --rollout-num-gpus-per-engine 1",
    ],
    "scripts/run-kimi-k2-Instruct.sh": ["--hf-checkpoint must be given", *[".*"] * 5],
    "slime_plugins/rollout_buffer/rollout_buffer_example.sh": [
        "--rollout-buffer-url must be left out in this version",
        "--keep-old-actor must be left out in this version",
    ],
}
"""The scripts that a plan refuses -> all of its problems. docs/from-slime.md has the reasons.

slime does not start the first script either, because Megatron divides layers equally. For DeepSeek-R1, SGLang computes
dense layers on one rank (--sglang-moe-dense-tp-size), and vLLM splits them over 64 ranks. The script of
Kimi-K2-Instruct lacks a backslash, so it passes only five arguments.
"""
QUANTISED = {
    "examples/low_precision/run-qwen3-235B-A22B-int4.sh": "int4 in groups of 32",
    "scripts/low_precision/run-kimi-k2-Thinking-int4.sh": "int4 in groups of 32",
    "scripts/low_precision/run-moonlight-16B-A3B-int4.sh": "int4 in groups of 32",
    "scripts/low_precision/run-qwen3-30B-A3B-int4.sh": "int4 in groups of 32",
    "scripts/low_precision/run-qwen3-30b-a3b-fp8.sh": "fp8 in blocks of 128 x 128",
    "scripts/run-kimi-k2-Thinking.sh": "int4 in groups of 32",
    "scripts/run-qwen3-235B-A22B.sh": "fp8 in blocks of 128 x 128",
}
ROW = {"prompt": "1+1?", "label": "2", "answer": "2", "problem": "1+1?", "text": "1+1?", "index": "0"}
ROW |= {"metadata": {"a": 1}, "reward_model": {"ground_truth": {"target": ["2"]}}}
ROW |= {"problem": "<image>1+1?", "images": [encode_image_for_rollout_engine(draw_image())]}
TURNS = [{"role": "user", "content": "<image>1+1?"}, {"role": "assistant", "content": "2"}]
PATHS = r"--(custom-.*-path|.*-function-path|.*-filter-path|rollout-sample-hook-path)"
LOCAL = r"HOME/|/\w|[\w.-]+/\S+\.(jsonl|parquet|json)(@\[.*)?$"
"""Paths that become paths below the test's folder."""
FILES = ("--custom-config-path", "--eval-config", "--sglang-config")
AWAITED = ("--custom-generate-function-path", "--custom-rm-path")
DATASETS = (
    "eval:\n  datasets:\n    - {name: aime, path: ROOT/aime-2024/aime-2024.jsonl, rm_type: deepscaler}\n"
)


def words(script: dict[str, Any]) -> list[str]:
    """The argv of a script."""
    argv = shlex.split(script["argv"])
    if "model" in script:
        at = argv.index("MODEL")
        argv[at : at + 1] = shlex.split(DATA["models"][script["model"]]["flags"])
    return argv


def write_rows(path: Path, prompts_only: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [ROW | {"messages": TURNS[:1] if prompts_only else TURNS}] * 512
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_hook(folder: Path, flag: str, path: str) -> None:
    *packages, module, function = path.split(".")
    if packages[:1] == ["slime"]:
        return
    place = folder.joinpath(*packages)
    place.mkdir(parents=True, exist_ok=True)
    word = "async " if flag in AWAITED else ""
    with open(place / f"{module}.py", "a") as file:
        file.write(f"{word}def {function}(*args, **kwargs):\n    return None\n\n\n")


def flags_with_values(argv: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yields each flag, and the range of its values in `argv`."""
    starts = [i for i, word in enumerate(argv) if word.startswith("--")]
    for start, end in zip(starts, [*starts[1:], len(argv)], strict=True):
        yield argv[start], start + 1, end


def write_stand_in(flag: str, value: str, script: str, root: Path) -> None:
    """Makes the file or folder that a flag names, except for rows of data."""
    path = Path(value)
    if flag == "--hf-checkpoint":
        path.mkdir(parents=True, exist_ok=True)
        if "vision_config" in DATA["configs"][script]:
            write_processor(path, "qwen3_vl")
        else:
            make_tokenizer().save_pretrained(path)
        (path / "config.json").write_text(DATA["configs"][script])
    elif flag == "--load" and (path / "config.json").exists():  # Hugging Face's files, which a plan opens
        config = json.loads((path / "config.json").read_text())
        layers = range(config.get("text_config", config)["num_hidden_layers"])
        names = [f"model.layers.{i}.input_layernorm.weight" for i in layers]
        save_file({name: torch.zeros(1) for name in names}, path / "model.safetensors")
    elif flag in FILES:
        write_rows(root / "aime-2024/aime-2024.jsonl", True)
        path.write_text(DATASETS.replace("ROOT", str(root)) if flag == "--eval-config" else "max_turns: 2\n")
    elif re.fullmatch(PATHS, flag):
        write_hook(root / "hooks", flag, value)
    elif flag in ("--ref-load", "--load", "--opd-teacher-load") and "torch_dist" in value:
        (path / "release").mkdir(parents=True, exist_ok=True)
        (path / "latest_checkpointed_iteration.txt").write_text("release")
        for name in (".metadata", "common.pt"):
            (path / "release" / name).touch()


def stand_ins(script: dict[str, Any], root: Path) -> list[str]:
    """Makes the files that the script names below `root`, and returns its argv with their paths."""
    argv = words(script)
    for flag, first, end in flags_with_values(argv):
        for i in range(first, end):
            if re.match(LOCAL, argv[i]):
                argv[i] = f"{root}/{argv[i].removeprefix('HOME/').lstrip('/')}"
        if flag in FILES:
            argv[first] = str(root / Path(argv[first]).name)
        if flag in ("--prompt-data", "--eval-prompt-data"):
            for path in (word for word in argv[first:end] if word.startswith(str(root))):
                write_rows(Path(path.split("@")[0]), prompts_only="sft_loss" not in argv)
        elif first < end:
            write_stand_in(flag, argv[first], script["config"], root)
    return argv


def problems(text: str) -> list[str]:
    """The problems in what a plan printed: one line, or the lines of a numbered list."""
    numbered = re.findall(r"^  \d+\. (.*)$", text, re.M)
    return numbered or [text.strip().splitlines()[-1].removeprefix("vime plan: ")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_planned_or_refused_by_name(
    name: str, tmp_path: Path, hooks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = stand_ins(SCRIPTS[name], tmp_path)
    if list(tmp_path.rglob("model.safetensors")):  # a plan with weights is compared with the machine
        argv += ["--gpu", "h200"]
    code = main(["plan", *argv])
    printed = capsys.readouterr()
    if name not in REFUSED:
        assert code == 0, printed.err
        assert "GiB" in printed.out
        return
    found = problems(printed.err)
    assert code == 2 and len(found) == len(REFUSED[name]), found
    for problem, wanted in zip(found, REFUSED[name], strict=True):
        assert re.match(wanted, problem), problem


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the modules of `write_hook` importable, and removes them from this process afterwards."""
    before = set(sys.modules)
    (tmp_path / "hooks").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "hooks")
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path / "hooks")):
            del sys.modules[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flags_of_a_script_are_accepted_or_refused(name: str, tmp_path: Path, hooks: None) -> None:
    argv = stand_ins(SCRIPTS[name], tmp_path)
    if name not in REFUSED:
        assert parse_config(argv).rollout.hf_checkpoint
        return
    with pytest.raises(ValueError) as error:
        parse_config(argv)
    assert re.search(REFUSED[name][0], str(error.value))


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantized_checkpoint_keeps_its_scheme(name: str, tmp_path: Path, hooks: None) -> None:
    config = parse_config(stand_ins(SCRIPTS[name], tmp_path))
    (note,) = [note for note in config.notes if "keep the weights of --hf-checkpoint in" in note]
    assert note.startswith(
        f"the engines keep the weights of --hf-checkpoint in {QUANTISED[name]}, and the trainer has"
    )
    assert ("; --use-tis weights the loss" in note) is not config.off_policy.use_tis


@pytest.mark.parametrize("name", [name for name in QUANTISED if name.endswith("int4.sh")])
def test_the_scripts_of_int4_train_with_rounded_weights(
    name: str, tmp_path: Path, hooks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripts have these variables in the runtime environment of their Ray job."""
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "32")
    config = parse_config(stand_ins(SCRIPTS[name], tmp_path))
    assert config.train.round_weights
    notes = [note for note in config.notes if "OPEN_TRAINING" in note or "--round-weights" in note]
    assert len(notes) == 3
    assert "OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1 is taken as --round-weights" in notes
    assert any("the trainer rounds them in the same way (--round-weights)" in note for note in notes)


def test_a_script_in_fp8_trains_a_model_with_experts_in_fp8(tmp_path: Path, hooks: None) -> None:
    config = parse_config(stand_ins(SCRIPTS["scripts/low_precision/run-qwen3-30b-a3b-fp8.sh"], tmp_path))
    assert config.megatron.has_fp8_blocks and "transformer_impl" not in config.megatron.overrides
    found = [note for note in config.notes if "--fp8-recipe blockwise" in note]
    assert found == [
        "--transformer-impl transformer_engine: without effect with --fp8-recipe blockwise, which the trainer's own "
        "layers compute",
        "--fp8-recipe blockwise: attention's linear layers, MLPs and experts compute in fp8; the head, the embedding, "
        "routers and the vision tower stay in bfloat16",
    ]


def test_the_page_counts_the_scripts() -> None:
    page = (ROOT / "docs/from-slime.md").read_text()
    assert f"{len(SCRIPTS) - len(REFUSED)} of {len(SCRIPTS)} scripts" in page
    rows = re.findall(r"^\| `([\w.-]+\.(?:sh|py))` ?[^|]*\|", page, re.M)
    assert sorted(rows) == sorted(Path(name.split()[0]).name for name in REFUSED)
