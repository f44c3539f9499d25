"""The receipt of a trainer rank (--receipt): a record per start, per trained rollout and per checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from slime.checkpoints.checkpoint_dir import iteration_path
from slime.config import Config
from slime.data.packing import MicroBatch
from slime.data.rank_data import RankData
from slime.megatron_backend.host_memory import host_threads
from slime.megatron_backend.model.gpt import get_parts
from slime.megatron_backend.parallel import ParallelInfo
from slime.megatron_backend.step.learner import Learner
from slime.receipts.chain import ChainWriter
from slime.receipts.digests import TRAINED, digest_files, digest_inputs, digest_results, digest_tensors
from slime.receipts.flags import FOLDER
from slime.receipts.keys import read_private_key
from slime.receipts.origin import describe_origin
from slime.types import TrainData


class ReceiptRecorder:
    """Writes the receipt of a rank. `name` is the group's name.

    Call `begin` after the models exist, `note_inputs` when a rollout's data arrive, `add` in each training pass,
    `note_state` after a role's training, `finish` after the rollout, and `note_checkpoint` after a save.
    """

    def __init__(self, config: Config, info: ParallelInfo, name: str) -> None:
        self._config, self._info = config, info
        self._run_dir = Path(config.logging.run_dir)
        key = config.debug.receipt_key
        path = self._run_dir / FOLDER / f"{name}-{info.rank}.jsonl"
        self._chain = ChainWriter(path, None if key is None else read_private_key(key))
        self._threads = host_threads(config)
        self._inputs: dict[str, object] = {}
        self._state: dict[str, str] = {}
        self._log_probs: dict[int, Tensor] = {}
        self.seconds = 0.0

    def begin(self, learners: Mapping[str, Learner], first: int) -> None:
        """Writes the record of a start: code, flags, layout and the state from which training begins."""
        state: dict[str, str] = {}
        for learner in learners.values():
            learner.residence.bring("parameters", "optimizer")
            state |= self._digest(learner, trained=False)
            learner.residence.release("parameters", "optimizer")
        self._chain.append(
            "begin",
            first=first,
            rank=self._info.rank,
            ranks=self._info.world_size,
            device=torch.cuda.get_device_name() if self._info.device.type == "cuda" else "cpu",
            threads=torch.get_num_threads(),
            state=state,
            **describe_origin(self._run_dir),
        )

    def note_inputs(self, data: RankData) -> None:
        """Records the data before the trainer changes them."""
        began = time.perf_counter()
        self._inputs, self._state, self._log_probs = digest_inputs(data), {}, {}
        self.seconds = time.perf_counter() - began

    def wants(self, data: TrainData, step_id: int) -> bool:
        return True

    def add(self, data: TrainData, batch: MicroBatch, log_probs: Tensor) -> None:
        """Adds the detached log-probs [R] of a micro-batch."""
        parts = batch.split(log_probs, data["response_lengths"])
        self._log_probs |= {i: part.clone() for i, part in zip(batch.samples, parts, strict=True)}

    def note_state(self, learner: Learner) -> None:
        """Records the trained weights and the optimizer of a role, while they are on the device."""
        began = time.perf_counter()
        self._state |= self._digest(learner, trained=True)
        self.seconds += time.perf_counter() - began

    def add_column(self, data: RankData) -> None:
        """Adds the column of the log-probs that training computed, if this rank has them."""
        if len(self._log_probs) == data.samples:
            data.fill(TRAINED, self._log_probs)

    def finish(self, rollout_id: int, data: RankData, steps: list[dict[str, float]]) -> None:
        """Writes the record of a trained rollout. `steps` has the metrics per optimizer step."""
        began = time.perf_counter()
        results = digest_results(data)
        self.seconds += time.perf_counter() - began
        self._chain.append(
            "step",
            rollout=rollout_id,
            inputs=self._inputs,
            indices=list(data.get("sample_indices", [])),
            results=results,
            steps=[{name: float(value).hex() for name, value in sorted(step.items())} for step in steps],
            state=self._state,
            seconds=round(self.seconds, 6),
        )

    def note_checkpoint(self, rollout_id: int) -> None:
        """Records the files of the policy's checkpoint, on rank 0. A save in the background has no complete files."""
        save = self._config.checkpoint.save
        if self._info.rank or save is None or self._config.checkpoint.async_save:
            return
        folder = iteration_path(Path(save), rollout_id)
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        files = digest_files(folder, names, self._threads)
        self._chain.append("checkpoint", rollout=rollout_id, files=files)

    def _digest(self, learner: Learner, *, trained: bool) -> dict[str, str]:
        prefix = "" if learner.role.name == "policy" else f"{learner.role.name} "
        named = iter_named_state(get_parts(learner.model), learner.optimizer, trained=trained)
        return {f"{prefix}{name}": value for name, value in digest_tensors(named, self._threads).items()}


def iter_named_state(
    models: list[nn.Module], optimizer: MegatronOptimizer, *, trained: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a role's state on this rank with their names: weights and buffers, then the optimizer's
    main weights and moments. `trained` leaves out frozen weights."""
    names: dict[int, str] = {}
    for part, model in enumerate(models):
        prefix = f"part {part} " if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            short = prefix + name.removeprefix("module.")
            names[id(parameter)] = short
            if (main := getattr(parameter, "main_param", None)) is not None:
                names[id(main)] = short
            if parameter.requires_grad or not trained:
                yield short, parameter.data
        for name, buffer in model.named_buffers():
            yield prefix + name.removeprefix("module."), buffer
    yield from _iter_optimizer(optimizer, names)


def _iter_optimizer(optimizer: MegatronOptimizer, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields main weights and moments. `names` has the names of weights, by the identity of their parameters."""
    for place, chained in enumerate(optimizer.chained_optimizers):
        inner = chained.optimizer
        groups = [] if inner is None else inner.param_groups  # None on a rank without a parameter
        for parameter, (group, order) in getattr(chained, "model_param_group_index_map", {}).items():
            names[id(groups[group]["params"][order])] = names[id(parameter)]
        for number, of_group in enumerate(groups):
            for order, parameter in enumerate(of_group["params"]):
                name = names.get(id(parameter), f"{place}.{number}.{order}")
                yield f"optimizer {name}.main", parameter.data
                for key, value in sorted(inner.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        yield f"optimizer {name}.{key}", value
