"""Calls the reward of a run once before the run starts, on a sample whose response is the first prompt's own text.

The call runs in a separate process for at most LIMIT_S seconds. The process ends before a reward uses the network,
starts a program or writes a file outside a temporary folder. Such a reward counts as not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.algo.losses import loss_for
from slime.config import Config
from slime.config.hook_calls import CALLS, check_call
from slime.config.sections.reward import eval_reward_key, is_hook, reward_names
from slime.hooks import load_function
from slime.rollout.rewards import REWARDS, RewardError, async_rm, batched_async_rm, unknown_type
from slime.types import Prompt, Sample
from vime.start.fork_call import OverLimit, run_in_fork
from vime.start.run_start import finished

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 5.0
"""Time limit of the call in seconds. Most rewards need milliseconds. A reward that needs longer is accepted
unchecked."""
_ROUTERS = {f"{name}_router_{part}" for name in ("sglang", "vllm") for part in ("ip", "port")}
_FACTS = _ROUTERS | {
    *("router_url", "model_routers", "sglang_model_routers", "vllm_model_routers", "vllm_router_headers"),
    *("frozen_engines", "own_servers", "chat_parser_path", "rollout_engine_dtype"),
}
"""Entries that only a run adds to the `args` of a hook (`ServedModels.facts`, `RolloutManager`)."""
_REMEDY = re.compile(r"must .+, got .+; |; it runs in a thread, ")
"""Matches an error that has a remedy: an error of vime, or `slime.user_code.remedy`."""
_CONNECTS = (
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.sendmsg",
    "socket.getaddrinfo",
    "socket.gethost",
)
_STARTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.spawn", "pty.spawn")
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
)
_SIGNALS = ("os.kill", "os.killpg", "signal.pthread_kill")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_OWN_ROLLOUTS = "slime.rollout."


class _Outside(BaseException):
    """The reward is about to act outside its process. A reward's `except Exception` does not catch it."""


class _Args(argparse.Namespace):
    """`args` without a run. It records the access to an entry that only a run has."""

    def __getattr__(self, name: str) -> object:
        if name in _FACTS:
            _leaves.append(f"it reads args.{name}, which only a run has")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass
class _Call:
    """The result of a call of the reward."""

    leaves: list[str]
    """Reasons why the call proves nothing."""
    problem: str | None = None
    """Error of the call."""
    returned: bool = False
    """True if the reward itself returned. A later function of the user cannot change the error then."""
    needs_run: bool = False
    """True if the reward read the state of a run, which does not exist yet."""
    reward: str = ""


_leaves: list[str] = []
"""Reasons why the call proves nothing, in its own process."""


def check_reward(
    config: Config,
    prompt: Prompt,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    custom_rm_path: str | None = None,
    rm_type: str | list[str] | None = None,
    where: str = "",
    on_reward: Callable[[str], object] | None = None,
) -> str | None:
    """Raises ValueError for a missing reward, or one that cannot score a sample of `prompt`. Returns a note if it was
    not called.

    `custom_rm_path`, `rm_type` and `where` belong to an evaluation dataset; `where` is its name in messages.
    `on_reward` receives the reward, as text.
    """
    if not _scores(config, evaluation=bool(where)):
        return None
    changes = bool(config.rollout.custom_generate_function_path or config.rollout.rollout_sample_hook_path)
    path = custom_rm_path or config.reward.custom_rm_path
    name = rm_type or prompt.metadata.get("rm_type") or config.reward.rm_type
    if path is None and name is None:
        if changes:
            return None  # a function of the user may score the samples that it makes
        raise ValueError(unknown_type(None, "--rm-type"))
    names = [] if path else reward_names(name)
    own = [one for one in names if is_hook(one)]
    for one in own:
        function = load_function(one, "--rm-type")
        check_call("--rm-type", one, function, CALLS["custom_rm_path"], scores=True)
    # random and zero need no check, code has a sandbox, and remote_rm uses the network
    called = [one for one in names if one in own or one.removeprefix("boxed_") in REWARDS]
    if path is None and not called:
        return None
    if path and not _can_be_called(path):
        return None  # another check reports it
    flag = f"--custom-rm-path {path}" if path else f"--rm-type {name}"
    sample = _sample(prompt, tokenizer())
    sample.custom_rm_path = custom_rm_path
    if rm_type or called != names:
        sample.metadata["rm_type"] = called
    key = eval_reward_key(config.reward) if where else config.reward.reward_key
    call = _called_as_runs_do(config, sample, key, flag, is_own=bool(path or own))
    if on_reward is not None and not (call.leaves or call.problem):
        on_reward(call.reward)
    return _verdict(call, f"{where}{flag}", changes)


def _called_as_runs_do(config: Config, sample: Sample, key: str | None, flag: str, *, is_own: bool) -> _Call:
    """Calls the reward with the sample, or with a list if the run does so.

    A generate function may return samples or lists, so a reward that fails with a sample is called with a list, too.
    """
    whole_group = config.reward.group_rm and sample.custom_rm_path is None
    call = _call_in_fork(config, sample, key, flag, whole_group=whole_group, guarded=is_own)
    path = sample.custom_rm_path is None and config.reward.custom_rm_path
    lists = path and config.rollout.custom_generate_function_path and not whole_group
    if not lists or call.leaves or call.returned or call.problem is None:
        return call
    list_call = _call_in_fork(config, sample, key, flag, whole_group=True, guarded=is_own)
    if list_call.problem is None or list_call.leaves:
        return list_call
    call.needs_run |= list_call.needs_run
    call.problem = f"{call.problem} (with a list of one sample: {list_call.problem})"
    return call


def _call_in_fork(
    config: Config, sample: Sample, key: str | None, flag: str, *, whole_group: bool, guarded: bool
) -> _Call:
    """Calls the reward in a separate process, with a list of the sample if `whole_group`.

    --group-rm passes such lists to the reward, and so does a generate function that returns lists.
    """
    with tempfile.TemporaryDirectory(prefix="vime-reward-", ignore_cleanup_errors=True) as folder:
        guard = _guard(folder) if guarded else _silent()
        try:
            return run_in_fork(
                lambda: _called(config, sample, guard, key, whole_group), flag, limit_s=LIMIT_S
            )
        except OverLimit:
            return _Call([f"it needs more than {LIMIT_S:g} s"])


def _verdict(call: _Call, flag: str, changes: bool) -> str | None:
    """Returns a note if the call proves nothing. Raises ValueError if the call failed.

    `changes`: another function of the user changes the samples before the reward gets them.
    """
    problem = call.problem
    if call.leaves or (problem and not call.returned and (changes or call.needs_run)):
        return f"{flag} was not checked: {call.leaves[0] if call.leaves else problem}"
    if problem:
        text = (
            f"{flag} must score each response, got this error for the first prompt with its own text as the "
            f"response: {problem}; mend the function, the columns that it reads (--label-key, --metadata-key), or flags"
        )
        raise ValueError(text.rpartition("; mend the function, ")[0] if _REMEDY.search(problem) else text)
    return None


def _scores(config: Config, *, evaluation: bool) -> bool:
    """Returns True if the run scores samples. A rollout function of the user scores its samples itself."""
    if not loss_for(config.algorithm).rewarded or config.debug.load_debug_rollout_data or finished(config):
        return False
    if config.data.num_rollout == 0 and not evaluation:
        return False
    return config.rollout.rollout_function_path.startswith(_OWN_ROLLOUTS)


def _can_be_called(path: str) -> bool:
    try:
        check_call("", path, load_function(path), CALLS["custom_rm_path"], scores=True)
    except ValueError:
        return False
    return True


def _sample(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Returns a finished sample. Its response is the text of the prompt; for a conversation, the text of the last
    message."""
    text = prompt.text if isinstance(prompt.text, str) else str(prompt.text[-1].get("content") or "")
    ids = list(tokenizer.encode(text, add_special_tokens=False)) or [0]
    return Sample(
        group_index=0,
        index=0,
        prompt=prompt.text,
        label=prompt.label,
        metadata=dict(prompt.metadata),
        response=text,
        tokens=[*ids, *ids],
        response_length=len(ids),
        rollout_log_probs=[-1.0] * len(ids),
        weight_versions=[0],
        status=Sample.Status.COMPLETED,
    )


def _called(
    config: Config,
    sample: Sample,
    guard: AbstractContextManager[None],
    reward_key: str | None,
    whole_group: bool,
) -> _Call:
    """Calls the reward in this process, which was started for the call."""
    call, args, flags = _Call(_leaves), config.namespace(), config.reward
    names = reward_names(sample.metadata.get("rm_type") or flags.rm_type)
    if sample.custom_rm_path or flags.custom_rm_path or any(map(is_hook, names)):
        args = _Args(**vars(args))
    with guard:
        try:
            if whole_group:
                (sample.reward,) = asyncio.run(batched_async_rm(args, [sample]))
            else:
                sample.reward = asyncio.run(async_rm(args, sample))
            call.returned, call.reward = True, f"{sample.reward!r:.200}"
            sample.reward_value(reward_key)
        except (Exception, _Outside) as error:  # border: a reward may raise any error
            call.problem, call.needs_run = _problem(error), _needs_run(error)
    return call


def _needs_run(error: BaseException | None) -> bool:
    """Returns True if the error, or an error that caused it, is that of a process without a run."""
    from slime.rollout.state import NoRunError  # the forked child may import it; the driver stays small

    while error is not None and not isinstance(error, NoRunError):
        error = error.__cause__ or error.__context__
    return error is not None


def _problem(error: BaseException) -> str:
    """Returns the text of the reward's error, without the name of the made-up sample."""
    return error.problem if isinstance(error, RewardError) else str(error)


@contextmanager
def _silent() -> Iterator[None]:
    """Discards the output of a reward, because it is no part of the plan."""
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until this process ends)
    sys.stdout = sys.stderr = nowhere
    for number in (1, 2):
        os.dup2(nowhere.fileno(), number)
    yield


@contextmanager
def _guard(folder: str) -> Iterator[None]:
    """Prevents changes outside this process and the folder until this process ends, because an audit hook stays."""
    tempfile.tempdir, sys.dont_write_bytecode = folder, True
    with _silent():
        sys.addaudithook(lambda event, arguments: _refuse(event, arguments, folder))
        yield


def _refuse(event: str, arguments: tuple[object, ...], folder: str) -> None:
    """Raises _Outside before a change outside this process."""
    reason = None
    if event.startswith(_CONNECTS):
        reason = "it uses the network"
    elif event.startswith(_STARTS):
        reason = "it starts a program"
    elif event.startswith(_SIGNALS):
        reason = "it sends a signal"
    elif event == "open" and len(arguments) == 3 and isinstance(arguments[2], int):
        writes, target = arguments[2] & _WRITES, arguments[0]
        if writes and isinstance(target, str | bytes) and not _is_own(os.fsdecode(target), folder):
            reason = f"it writes {os.fsdecode(target)}"
    elif event.startswith(_CHANGES):
        outside = (path for path in _paths(arguments) if not _is_own(path, folder))
        reason = next((f"it changes {path}" for path in outside), None)
    if reason is not None:
        _leaves.append(reason)
        raise _Outside(reason)


def _paths(arguments: tuple[object, ...]) -> Iterator[str]:
    """Yields the files of an event of `os`. A relative path may start at an open folder, the last argument."""
    folder = arguments[-1]
    for argument in arguments[:2]:
        if isinstance(argument, str | bytes):
            path = os.fsdecode(argument)
            from_folder = not os.path.isabs(path) and isinstance(folder, int) and folder >= 0
            yield os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path) if from_folder else path


def _is_own(target: str, folder: str) -> bool:
    return target == os.devnull or os.path.abspath(target).startswith(folder)
