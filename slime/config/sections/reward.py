"""Flags of the reward section."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COEFFICIENT, COUNT, SECONDS


@dataclass(frozen=True)
class RewardConfig:
    """The score of a response, and its conversion to training data."""

    rm_type: str | None = flag(
        None,
        "built-in reward: math, deepscaler, dapo, gsm8k, gpqa, f1, ifbench, code, random, zero, remote_rm; several "
        "with commas are added; my_file.py:my_function is one, too",
        commas=True,
    )
    rm_weights: list[float] | None = flag(  # noqa: RUF009
        None, "weights of the rewards of --rm-type, in its order (default: 1)", range=COEFFICIENT, commas=True
    )
    reward_key: str | None = flag(None, "field of the reward to train on, if the reward is an object")
    eval_reward_key: str | None = flag(
        None, "field of the reward to report in evaluation (default: --reward-key)"
    )
    group_rm: bool = flag(False, "score all responses of a prompt in one call")
    use_overlong_filtering: bool = flag(
        False, "do not train on responses that reached their length limit (DAPO)"
    )
    overlong_buffer_len: int | None = flag(
        None,
        "length of the zone before --rollout-max-response-len in which the reward of a response falls (DAPO)",
        range=COUNT,
    )
    overlong_penalty_factor: float = flag(
        1.0, "what the reward loses at the end of that zone", range=COEFFICIENT
    )
    rm_url: str | None = flag(
        None,
        "address of the reward server for --rm-type remote_rm, or of the teacher for --opd-type sglang and vllm",
    )
    reward_deadline_s: float = flag(600.0, "maximum seconds per call of a reward", range=SECONDS)
    custom_rm_path: str | None = flag(None, "async fn(args, sample) -> float | dict")
    custom_reward_post_process_path: str | None = flag(None, "fn(args, samples) -> (raw_rewards, rewards)")
    custom_convert_samples_to_train_data_path: str | None = flag(None, "fn(args, samples) -> dict")


def eval_reward_key(reward: RewardConfig) -> str | None:
    """Returns the entry of a reward that evaluation reports. --eval-reward-key has priority over --reward-key."""
    return reward.eval_reward_key or reward.reward_key


def reward_names(rm_type: object) -> list[str]:
    """Returns the rewards in a value of --rm-type, or of rm_type in metadata: "math,f1" or a list. The list is empty
    without a reward."""
    if not rm_type:
        return []
    parts = rm_type if isinstance(rm_type, list | tuple) else str(rm_type).split(",")
    return [str(part).strip() for part in parts]


def is_hook(name: str) -> bool:
    """Returns True if a name in --rm-type is the path of a function of the user. Names of built-in rewards have no
    dot."""
    return "." in name


def part_name(name: str) -> str:
    """Returns the name of a reward in metrics. For a function of the user, this is the name without its module or
    file."""
    return re.split(r"[.:]", name)[-1] if is_hook(name) else name
