"""Fetches published weights with scripts/get_model.py. Transformers, the trainer and vLLM agree on their log-probs
before and after an update. After two steps of GRPO on rows like GSM8K's, transformers gives the same answers from
an export."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import make_config
from offline_engine import offline_engine
from torch.multiprocessing import spawn
from train_fixtures import rows, run, samples, script, vime
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.weight_sync.file_channel import FileChannel
from slime.weight_sync.slices import whole_slices

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAMES = ("smollm2-135m", "gemma3-270m")
TEXT = "Ann has 12 apples and buys 5 bags of 6 apples each. How many does Ann have now? 5 * 6 = 30. 12 + 30 = 42."
QUESTIONS = {
    "Ann has 12 apples and buys 5 bags of 6 apples each. How many apples does she have?": (
        "5*6=30",
        "12+30=42",
    ),
    "A train makes 3 trips of 40 km a day. How far does it go in 2 days?": ("3*40=120", "2*120=240"),
    "Tom reads 15 pages a day. His book has 90 pages. How many days does he need?": ("90/15=6",),
    "A shirt costs $20 and is sold at half of its price. What do 4 shirts cost?": ("20/2=10", "4*10=40"),
}
"""The project's own questions, in the form of GSM8K's rows."""
TOLERANCE = 1e-4  # nats between two float32 implementations with 30 layers


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def root(name: str) -> Iterator[Path]:
    """Yields a folder with the model and the prompts. Its path is short, because paths of Unix sockets have a limit."""
    root = Path(tempfile.mkdtemp(prefix="vime-published-"))
    script("get_model").main([name, str(root / "model")])
    lines = [
        {"question": question, "answer": "\n".join([*steps, f"#### {steps[-1].partition('=')[2]}"])}
        for question, steps in QUESTIONS.items()
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    yield root
    shutil.rmtree(root, ignore_errors=True)


def train(_: int, root: Path, tokens: list[int]) -> None:
    """Saves, in a child process, the trainer's log-probs before and after a step along their gradient, with both
    published updates. It writes the second weights as a Hugging Face directory."""
    from slime.checkpoints.hf_config import read_hf_config
    from slime.data.token_slice import token_slice
    from slime.megatron_backend.checkpoint.weights import export_hf, load_hf, save_hf
    from slime.megatron_backend.model.attention import packed_layout
    from slime.megatron_backend.model.gpt import build_model, compute_logits, stage_output, unwrap
    from slime.megatron_backend.parallel import init_parallel

    config = make_config()
    device = init_parallel(0, 1, config, init_method=f"file://{root}/store").device
    hf_config = read_hf_config(root / "model")
    model = build_model(hf_config, config)
    load_hf(model, root / "model")
    ids = torch.tensor(tokens, device=device)
    channel, found = FileChannel(root / "weights"), []
    for version in (0, 1):
        output = stage_output(model, ids, packed_layout(token_slice([len(tokens)]), device))
        logits = compute_logits(model, output)[:-1, : hf_config["vocab_size"]].float()
        values = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(
            (values.detach().cpu(), channel.publish(whole_slices(export_hf(model)), version, checksums=True))
        )
        if version:
            break
        values.mean().backward()
        for parameter in unwrap(model).parameters():
            parameter.data.add_(1e-3 * parameter.main_grad.sign())
    save_hf(model, root / "model", root / "stepped")
    torch.save(found, root / "trained.pt")


def transformers_log_probs(directory: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def test_three_programs_give_the_same_log_probs(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = AutoTokenizer.from_pretrained(root / "model").encode(TEXT)
    spawn(train, args=(root, tokens))
    (before, first), (after, second) = torch.load(root / "trained.pt", weights_only=False)
    assert before.mean() > -3.5, "it is text to a model that learned"
    assert (after - before).abs().max() > 0.1
    for directory, values in (("model", before), ("stepped", after)):
        difference = (transformers_log_probs(root / directory, tokens) - values).abs()
        print(
            f"{name}, {directory}: transformers against trainer {difference.mean():.1e}, at most {difference.max():.1e}"
        )
        assert difference.mean() < TOLERANCE and difference.max() < 10 * TOLERANCE
    settings: dict[str, Any] = {"max_model_len": 256}
    with offline_engine(root / "model", root / "weights", monkeypatch, **settings) as engine:
        for update, values in ((None, before), (second, after), (first, before)):
            if update is not None:
                engine.take(update)
            difference = (engine.log_probs(tokens) - values).abs()
            print(f"{name}: vLLM against trainer {difference.mean():.1e}, at most {difference.max():.1e}")
            assert difference.mean() < TOLERANCE and difference.max() < 10 * TOLERANCE


def grpo(root: Path) -> list[str]:
    """Returns the flags of two steps; the evaluation after them is greedy."""
    run_dir, model = root / "run", root / "model"
    chat = ["--apply-chat-template"] if (model / "chat_template.jinja").exists() else []
    return [
        *("--device", "cpu", "--colocate", "--actor-num-gpus-per-node", "1", "--hf-checkpoint", str(model)),
        *(
            "--prompt-data",
            str(root / "rows.jsonl"),
            "--input-key",
            "question",
            "--label-key",
            "answer",
            *chat,
        ),
        *(
            "--rm-type",
            "gsm8k",
            "--num-rollout",
            "2",
            "--rollout-batch-size",
            "2",
            "--n-samples-per-prompt",
            "4",
        ),
        *("--rollout-max-response-len", "16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "1024"),
        # Rewards of so short answers are 0, but the entropy still has a gradient.
        *("--entropy-coef", "0.01", "--lr", "1e-5", "--check-weight-update-equal"),
        *(
            "--eval-interval",
            "2",
            "--eval-prompt-data",
            "rows",
            str(root / "rows.jsonl"),
            "--eval-temperature",
            "0",
        ),
        *("--save", str(root / "checkpoint"), "--no-save-optim", "--run-dir", str(run_dir)),
        *(
            "--save-debug-rollout-data",
            str(run_dir / "samples" / "{rollout_id}.pt"),
            "--vllm-max-model-len",
            "512",
        ),
    ]


def test_two_grpo_steps_and_an_export_that_answers_alike(root: Path, name: str) -> None:
    """The last evaluation is greedy. Transformers generates the same tokens from the export, but not from the first
    weights."""
    run_dir, model = root / "run", root / "model"
    run(vime("train", *grpo(root)), root / "train.out", timeout_s=900)
    steps = rows(run_dir, "train/step")
    assert len(steps) == 2
    for row in steps.values():
        print(f"{name}: vLLM against trainer in a run {row['train/train_rollout_logprob_abs_diff']:.1e}")
        assert row["train/train_rollout_logprob_abs_diff"] < TOLERANCE and row["train/grad_norm"] > 0

    export = [
        "--load",
        str(root / "checkpoint"),
        "--hf-checkpoint",
        str(model),
        "--output-dir",
        str(root / "export"),
    ]
    run(vime("export", *export), root / "export.out", timeout_s=300)
    policy = AutoModelForCausalLM.from_pretrained(root / "export", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert not torch.equal(policy.get_input_embeddings().weight, start.get_input_embeddings().weight)
    answered = samples(run_dir, "eval_2")
    assert len(answered) == len(QUESTIONS)
    for sample in answered:
        prompt = sample["tokens"][: -sample["response_length"]]
        generated = policy.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0].tolist()
        assert generated == sample["tokens"]
