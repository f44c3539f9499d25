"""Checks of a generate function and of an agent, on a real engine: masks, log-probs and weight versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from slime.hooks import Hook
from slime.types import Sample
from vime.testing.paths import function_path

if TYPE_CHECKING:
    from vime.testing.engine import TinyEngine

ROWS = tuple({"prompt": f"What is {a} + {a + 1}?", "label": str(2 * a + 1)} for a in range(4))
"""The prompts if the caller gives none."""
CLOSE = 1e-3
"""The largest difference in nats of an engine's log-prob from transformers' on the tiny model in float32."""


def check_generate(
    generate: Hook | str,
    engine: TinyEngine,
    rows: Sequence[Mapping[str, object]] = ROWS,
    *,
    samples_per_prompt: int = 2,
    updates: int = 1,
    **flags: object,
) -> list[Sample]:
    """Generates samples with the function, and returns those of the last weights.

    Args:
        generate: the function of --custom-generate-function-path, or its path.
        engine: the fixture `tiny_engine`.
        rows: lines of a prompt file, with `prompt` and `label`.
        samples_per_prompt: samples per line.
        updates: updates of the engine's weights, each with a rollout after it.
        flags: more flags of the run, with underscores, such as `custom_rm_path`.

    Raises AssertionError if a sample is incomplete, if it names another weight version than the engine's, or if a
    trained token's log-prob differs from transformers' by more than `CLOSE`. Such a difference shows that the tokens of
    the sample are not the tokens that the engine sampled.
    """
    path = function_path(generate, "generate")
    samples: list[Sample] = []
    for number in range(updates + 1):
        if number:
            engine.update()
        samples = engine.rollout(
            rows, samples_per_prompt=samples_per_prompt, custom_generate_function_path=path, **flags
        )
        trajectories = {sample.index for sample in samples}
        wanted = len(rows) * samples_per_prompt
        assert len(trajectories) == wanted, (
            f"generate must make {wanted} trajectories, got {len(trajectories)}"
        )
        for sample in samples:
            _check_sample(sample, engine)
    return samples


def check_agent(
    generate: Hook | str,
    engine: TinyEngine,
    rows: Sequence[Mapping[str, object]] = ROWS,
    *,
    conversations: int = 100,
    parts: int = 1,
    **flags: object,
) -> list[Sample]:
    """Runs an agent in `conversations` conversations at once, and returns their samples.

    Args:
        generate: the function of --custom-generate-function-path that runs the agent, or its path.
        engine: the fixture `tiny_engine`.
        rows: lines of a prompt file, which the conversations take in turn.
        conversations: number of conversations.
        parts: most samples per conversation. An agent that changes earlier messages makes several.
        flags: more flags of the run.

    Raises AssertionError as `check_generate` does, and if a conversation has more than `parts` samples. Then a later
    request did not continue the tokens of the earlier one: its text was tokenised again, or messages were changed.
    """
    turns = [rows[number % len(rows)] for number in range(conversations)]
    samples = check_generate(generate, engine, turns, samples_per_prompt=1, updates=0, **flags)
    for index, count in sorted(
        Counter(sample.index for sample in samples).items(), key=lambda pair: -pair[1]
    )[:1]:
        drift = f"each conversation must make at most {parts} samples, got {count} in conversation {index}"
        assert count <= parts, f"{drift}; a request must continue the tokens of the earlier one"
    return samples


def _check_sample(sample: Sample, engine: TinyEngine) -> None:
    who = f"sample {sample.index}"
    if sample.remove_sample:
        return
    try:
        sample.check()
    except ValueError as error:
        raise AssertionError(str(error)) from error
    versions = set(map(int, sample.weight_versions))
    assert versions == {engine.version}, (
        f"{who} must have weight version {engine.version}, got {sorted(versions)}"
    )
    expected = engine.log_probs(sample.tokens, sample.response_length)
    mask = sample.loss_mask or [1] * sample.response_length
    pairs = zip(mask, sample.rollout_log_probs or (), expected, strict=True)
    worst = max((abs(own - model), number) for number, (on, own, model) in enumerate(pairs) if on)
    drift = f"the log-probs of {who} must be those of its tokens, got a difference of {worst[0]:.3g} nats at"
    assert worst[0] <= CLOSE, (
        f"{drift} token {worst[1]} of its response; keep the ids that the engine returned"
    )
