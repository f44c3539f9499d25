"""Lists environment variables of slime's launch scripts that can change training, with the reaction of a run.

A launch script exports such variables, or has them in the runtime environment of its Ray job or in --train-env-vars.
`REFUSED` changes the training, and no code here does that change: the run does not start. `UNREAD` has no effect here,
and a note gives the reason. Variables that a library of the run reads itself keep their effect, such as NCCL_ALGO,
CUBLAS_WORKSPACE_CONFIG and VLLM_BATCH_INVARIANT. `vime.switch` reads the variables with the meaning of a flag.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slime.config.fields import FALSE_WORDS
from slime.config.schema import Config
from slime.records.errors import FlagError


@dataclass(frozen=True)
class RejectedVariable:
    """Variables that a run does not accept, except with a value that switches them off."""

    rule: str
    advice: str


@dataclass(frozen=True)
class UnreadVariable:
    """Variables that no part of a run reads, or only `reader`."""

    why: str
    reader: str | None = None
    """A value of --rollout-backend or of --transformer-impl."""


_INT4 = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
_OPEN_TRAINING = RejectedVariable(
    "be unset, because the trainer rounds weights to INT4 only (--round-weights)",
    "unset it: the engines keep the checkpoint's scheme, and --use-tis corrects for the difference of the log-probs",
)
_ORIGINAL = RejectedVariable(
    "be unset, because the loss needs the log-probs of the distribution that the engine samples from",
    "unset it; --rollout-temperature 1 makes both distributions equal",
)
REFUSED: dict[str, RejectedVariable] = {
    "OPEN_TRAINING_*_FLAG": _OPEN_TRAINING,
    "MEGATRON_USE_KV_QAT": RejectedVariable(
        "be unset, because the trainer does not round keys and values in its forward pass", "unset it"
    ),
    "SGLANG_RETURN_ORIGINAL_LOGPROB": _ORIGINAL,
    "RETURN_ORIGINAL_LOGPROB": _ORIGINAL,
    "ENABLE_ROUTING_REPLAY": RejectedVariable(
        "be unset, because only flags switch on the replay of experts",
        "give --use-routing-replay or --use-rollout-routing-replay",
    ),
}
"""Pattern of names -> why a run does not accept the variable."""
_READ = ("SLIME_AGENT_*", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_APPLY_QK_LAYER_SCALING")
"""Variables of the patterns below that code of this project or of megatron-core reads."""
UNREAD: dict[str, UnreadVariable] = {
    "OPEN_TRAINING_*": UnreadVariable("--round-weights takes the groups of --hf-checkpoint"),
    "NVTE_*": UnreadVariable(
        "Transformer Engine reads them, and the trainer does not use it", "transformer_engine"
    ),
    "SGLANG_*": UnreadVariable("SGLang reads them, and no engine of this run is SGLang's", "sglang"),
    "SGL_*": UnreadVariable("SGLang reads them, and no engine of this run is SGLang's", "sglang"),
    "MEGATRON_*": UnreadVariable("megatron-core reads no such variable"),
    "INDEXER_*": UnreadVariable("config.json and the model family decide how an indexer rotates its heads"),
    "ROUTING_REPLAY_STAGE": UnreadVariable("--use-routing-replay and --use-rollout-routing-replay decide"),
    "SLIME_*": UnreadVariable("no code here reads them"),
}
"""Pattern of names -> why the variables have no effect."""


def check_variables(config: Config, environ: Mapping[str, str]) -> None:
    """Raises ValueError for the first variable of `REFUSED` in `environ` or --train-env-vars that is not off."""
    for name, value in _variables(config, environ):
        if value.strip().lower() in ("", *FALSE_WORDS):
            continue
        if name == _INT4:  # vime.switch reads it from the environment
            if not config.train.round_weights:
                raise FlagError(name, "be left out of --train-env-vars", value, "give --round-weights")
            continue
        for pattern, refused in REFUSED.items():
            if fnmatchcase(name, pattern):
                raise FlagError(name, refused.rule, value, refused.advice)


def variable_notes(config: Config, environ: Mapping[str, str], backends: Collection[str]) -> Iterator[str]:
    """Yields one note per reason, with the variables of `UNREAD` in `environ` or --train-env-vars. `backends` are the
    rollout backends of all engines of the run."""
    readers = {*backends, str(config.megatron.overrides.get("transformer_impl"))}
    names: dict[str, list[str]] = {}
    for name, _ in _variables(config, environ):
        if any(fnmatchcase(name, pattern) for pattern in (*_READ, *REFUSED)):
            continue
        why = next(
            (u.why for p, u in UNREAD.items() if fnmatchcase(name, p) and u.reader not in readers), None
        )
        if why is not None:
            names.setdefault(why, []).append(name)
    for why, found in names.items():
        yield f"environment variables without effect: {', '.join(found)}; {why}"


def _variables(config: Config, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    trainers = {name: str(value) for name, value in config.cluster.train_env_vars.items()}
    return sorted((dict(environ) | trainers).items())
