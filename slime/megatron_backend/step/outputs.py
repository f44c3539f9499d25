"""The outputs of a trainer rank: checkpoints, and the weights for the engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import torch

from slime.checkpoints.quantized_files import read_quantized_weights
from slime.config import Config
from slime.config.hook_calls import Hooks
from slime.config.sections.checkpoint import HfFormat
from slime.megatron_backend.checkpoint.background import BackgroundSaves
from slime.megatron_backend.checkpoint.merged import merged
from slime.megatron_backend.checkpoint.own_slices import OwnSlices
from slime.megatron_backend.checkpoint.peft import export_adapters, peft_config
from slime.megatron_backend.checkpoint.weights import export_hf, live, save_hf
from slime.megatron_backend.step.models import Models
from slime.models.lora import sends_adapters
from slime.models.quantized.quantized_checkpoint import QuantizedWeights
from slime.protocols import CHECKPOINT, FULL, WeightSet, WeightUpdate
from slime.roles import POLICY
from slime.weight_sync.channel import Export, TrainerSettings
from slime.weight_sync.delta.snapshot import Snapshot
from slime.weight_sync.publisher import Publisher, Written
from slime.weight_sync.quantized import quantize_export


class Outputs:
    """The outputs of a trainer rank; every call is collective. `explained` explains an error of memory in its block.
    Only ranks that have the policy send weights to engines.

    `version`: number of rollouts on which the current weights were trained.
    """

    def __init__(
        self,
        config: Config,
        hooks: Hooks,
        models: Models,
        device: torch.device,
        version: int,
        explained: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.config, self.models, self.version, self._explained = config, models, version, explained
        self._hooks = hooks
        # half: the error that names a hanging engine must come before the errors of the other ranks, which wait for
        # rank 0
        timeout_s = 30.0 * config.cluster.distributed_timeout_minutes
        minutes = config.cluster.distributed_timeout_minutes
        self._background = BackgroundSaves(minutes) if config.checkpoint.async_save else None
        flags = config.weight_update
        assert flags.weight_dir is not None
        settings = TrainerSettings(
            *(Path(flags.weight_dir), flags.update_weight_buffer_size, device, timeout_s),
            keep_files=flags.update_weight_disk_keep_files,
            stem=self._stem(),
        )
        compare = flags.check_weight_update_equal
        if models.main.role is POLICY:
            self._publisher = Publisher.of(
                *(flags.update_weight_transport, settings, self._export()),
                compare=compare,
                weights=self._weights(),
                snapshot=self._snapshot(),
                written=self._written(),
            )

    def save(self, rollout_id: int) -> None:
        """Saves checkpoints for all trained roles (and --save-hf) as iteration `rollout_id`; each checkpoint appears
        only when complete. The policy's comes last, so it never exists without the others. With --async-save, this
        method waits for the previous save and returns when the values are on the host."""
        self.finish_save()
        with self._explained(f"saving rollout {rollout_id}"):
            for learner in reversed(self.models.learners.values()):
                of_policy = learner.role is POLICY and self.config.checkpoint.save_hf
                then = (lambda: self._save_hf(rollout_id)) if of_policy else None
                learner.save(rollout_id, then, self._background)

    def save_in_memory(self, rollout_id: int) -> None:
        """Copies the state of all trained roles into the host's memory."""
        with self._explained(f"storing rollout {rollout_id}"):
            for learner in self.models.learners.values():
                learner.save_in_memory(rollout_id)

    def finish_save(self) -> None:
        """Returns when the files of the last save are complete. Raises the error of a save that failed."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Waits for the files that are being written."""
        if self._background is not None:
            self._background.close()

    def next_weights(self, version: int, receivers: dict[str, int]) -> WeightUpdate | None:
        """Returns the next part of the current weights, called `version`, or None after the last part (see
        Publisher)."""
        with self._explained(f"publishing weights {version}"):
            part = self._publisher.next(version, receivers)
            if part is None:
                self.models.main.residence.release("parameters", timer="weights_offload")
        return part

    def weights_file(self) -> WeightUpdate:
        """Returns the current weights in a file, for an engine that starts between two updates."""
        return self._publisher.file(self.version)

    def _stem(self) -> str:
        """Returns the stem of the names of weight files. Runs that share engines may also share the folder of weights,
        so each adapter has separate files."""
        return (
            f"adapter-{self.config.lora.lora_name}" if sends_adapters(self.config) else TrainerSettings.stem
        )

    def _weights(self) -> WeightSet:
        """Returns the record of the policy's weights that engines get."""
        if not sends_adapters(self.config):
            return FULL
        settings = peft_config(self.models.main.model, self.config.rollout.hf_checkpoint)
        return WeightSet("adapter", CHECKPOINT, self.config.lora.lora_name, settings)

    def _snapshot(self) -> Snapshot | None:
        flags = self.config.weight_update
        if flags.update_weight_mode == "full":
            return None
        return Snapshot(flags.update_weight_delta_encoding, flags.update_weight_delta_checksum)

    def _written(self) -> Written | None:
        name = "custom_update_weight_post_write_path"
        if self.config.get_value(name) is None:
            return None
        return lambda folder, engines: self._hooks.call(name, str(folder), engines)

    def _export(self) -> Export:
        main = self.models.main
        if sends_adapters(self.config):
            return Export(lambda: export_adapters(main.model, main.residence.read))
        own = OwnSlices(main.model)
        export = Export(
            lambda: export_hf(main.model, merged(main.model, main.residence.read)),
            lambda: own(merged(main.model, main.residence.read)),
        )
        weights = self._scheme()
        return export if weights is None else quantize_export(export, weights)

    def _scheme(self) -> QuantizedWeights | None:
        """Returns the form in which engines keep the weights of a quantised --hf-checkpoint."""
        return read_quantized_weights(self.config.rollout.hf_checkpoint) if self.config.num_engines else None

    def _save_hf(self, rollout_id: int) -> None:
        flags, model = self.config.checkpoint, self.models.main.model
        assert flags.save_hf is not None
        form = cast(HfFormat | None, flags.save_hf_format)
        out = Path(flags.save_hf.format(rollout_id=rollout_id))
        source = self.config.rollout.hf_checkpoint
        save_hf(model, source, out, read=merged(model, live), form=form)
