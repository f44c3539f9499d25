"""The trainer of a service (slime.protocols.tenants.TenantTrainer): passes, steps and files of the adapters."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rl_kernel
from slime.checkpoints.hf_files import write_tensors
from slime.config import Config
from slime.config.problems import require_value
from slime.data.packing import choose_bins
from slime.data.token_slice import token_slice
from slime.megatron_backend.checkpoint.peft import save_peft
from slime.megatron_backend.model.attention import packed_layout
from slime.megatron_backend.model.gpt import gather_hidden, output_weight, stage_output, unwrapped
from slime.megatron_backend.parallel import ParallelInfo, destroy_parallel
from slime.megatron_backend.step.heads.head import LmHead
from slime.megatron_backend.tenants.adapters import Tenant, add_switches, make_lora
from slime.megatron_backend.tenants.losses import (
    LOSSES,
    TARGETS,
    WEIGHTS,
    check_datum,
    check_loss,
    make_columns,
)
from slime.protocols.tenants import AdamParams, LossSpec, PassResult, TenantDatum, TenantSpec
from slime.system.disk_space import DiskSpaceGuard

STATE_FILE, SPEC_FILE = "state.safetensors", "adapter.json"


class Trainer:
    """A model with frozen weights and the adapters of its tenants, on one device.

    `most_rank` is the largest rank of an adapter, and `context` the largest number of tokens of a datum. A pass packs
    data into micro-batches of at most --max-tokens-per-gpu tokens; a longer datum is a micro-batch. `folder` has the
    rendezvous file of the process group, and `close` removes it.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        head: LmHead,
        info: ParallelInfo,
        *,
        most_rank: int,
        context: int,
        folder: TemporaryDirectory[str],
    ) -> None:
        self.config, self.model, self.head, self.info = config, model, head, info
        self.most_rank, self.context, self._folder = most_rank, context, folder
        (self.inner,) = unwrapped(model)
        self.switches = add_switches(self.inner)
        self.tenants: dict[str, Tenant] = {}
        self.active: Tenant | None = None

    def add(self, name: str, spec: TenantSpec) -> None:
        """Adds an adapter. Without a seed in `spec`, its name is the seed."""
        if name in self.tenants:
            raise ValueError(f"adapter names must be unique, got {name} twice; remove the first one")
        lora = make_lora(self.inner, spec, self.most_rank)
        seed = zlib.crc32(name.encode()) if spec.seed is None else spec.seed
        self.tenants[name] = Tenant(self.inner, spec, lora, seed)

    def remove(self, name: str) -> None:
        tenant = self._tenant(name)
        if tenant is self.active:
            self.activate(None)
        del self.tenants[name]

    def forward(self, name: str, data: Sequence[TenantDatum], loss: LossSpec) -> PassResult:
        with torch.no_grad():
            return self._run(self._tenant(name), list(data), loss, backward=False)

    def forward_backward(self, name: str, data: Sequence[TenantDatum], loss: LossSpec) -> PassResult:
        """Adds the gradients of a pass to the tenant's. A pass that fails adds nothing."""
        return self._run(self._tenant(name), list(data), loss, backward=True)

    def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        return self._tenant(name).step(params)

    def save_state(self, name: str, folder: Path, optimizer: bool) -> None:
        tenant = self._tenant(name)
        tensors = {key: x.detach().cpu().contiguous() for key, x in tenant.state(optimizer=optimizer).items()}
        with DiskSpaceGuard("--run-dir", folder, "an adapter's state"):
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(tensors, folder / STATE_FILE)
            (folder / SPEC_FILE).write_text(
                json.dumps(asdict(tenant.spec), indent=2) + "\n", encoding="utf-8"
            )

    def load_state(self, name: str, folder: Path, optimizer: bool) -> None:
        """Raises ValueError for the state of an adapter with another rank, alpha or other modules."""
        tenant = self._tenant(name)
        saved = TenantSpec(**json.loads((folder / SPEC_FILE).read_text(encoding="utf-8")))
        for field in ("rank", "alpha", "train_attn", "train_mlp"):
            if getattr(saved, field) != (mine := getattr(tenant.spec, field)):
                raise ValueError(
                    f"the saved adapter must have {field} {mine} as this one has, got {getattr(saved, field)}; create "
                    "an adapter with the saved settings and load into it"
                )
        tenant.load(load_file(folder / STATE_FILE), optimizer=optimizer)

    def export_peft(self, name: str, folder: Path) -> None:
        self.activate(self._tenant(name))
        save_peft(self.model, folder, require_value(self.config.rollout.hf_checkpoint), flag="--run-dir")

    def close(self) -> None:
        """Frees the model and its process group."""
        self.activate(None)
        self.tenants.clear()
        destroy_parallel()
        self._folder.cleanup()

    def _tenant(self, name: str) -> Tenant:
        if name not in self.tenants:
            raise ValueError(f"the adapter must exist, got {name}; create it first")
        return self.tenants[name]

    def activate(self, tenant: Tenant | None) -> None:
        """Makes the model compute with the tenant's adapter, or with the base for None. Only references change, no
        values."""
        if tenant is self.active:
            return
        current = {} if tenant is None else dict(tenant.adapters.of())
        for name, switch in self.switches.items():
            switch.current = current.get(name)
        if tenant is None:
            del self.inner.adapters
        else:
            self.inner.adapters = tenant.adapters
        self.active = tenant

    def _run(self, tenant: Tenant, data: list[TenantDatum], loss: LossSpec, *, backward: bool) -> PassResult:
        check_loss(loss)
        if not data:
            raise ValueError("a pass must have data, got none; send a datum")
        vocab = self.head.vocabulary()["vocab_size"]
        for number, datum in enumerate(data):
            check_datum(number, datum, loss, vocab, self.context)
        self.activate(tenant)
        outputs: list[dict[str, list[float]]] = [{} for _ in data]
        total, gradients = 0.0, list[Tensor]()
        try:
            for members in choose_bins(self.config.data, 1, [len(datum.tokens) for datum in data]):
                row = [data[i] for i in members]
                log_probs, losses = self._losses(row, loss)
                if backward:
                    losses.sum().backward()
                    gradients = self._take_gradients(tenant, gradients)
                total += losses.detach().double().sum().item()
                self._store(outputs, members, row, loss, log_probs.detach(), losses.detach())
        finally:
            for parameter in tenant.parameters:  # of a micro-batch that failed
                parameter.grad = None
        if backward:
            tenant.add_gradients(gradients)
        return PassResult(outputs, {"loss:sum": total})

    def _losses(self, row: list[TenantDatum], loss: LossSpec) -> tuple[Tensor, Tensor]:
        """Returns the log-probs and losses [R] of a micro-batch's tokens."""
        device = self.info.device
        layout = packed_layout(token_slice([len(datum.tokens) for datum in row]), device)
        tokens = torch.tensor([token for datum in row for token in datum.tokens], device=device)
        targets = torch.tensor([int(x) for datum in row for x in datum.inputs[TARGETS]], device=device)
        hidden = gather_hidden(self.model, stage_output(self.model, tokens, layout))
        log_probs = rl_kernel.linear_logp(
            hidden,
            output_weight(self.model),
            targets,
            workspace_bytes=self.head.workspace_bytes,
            **self.head.vocabulary(),
        )
        assert isinstance(log_probs, Tensor)
        return log_probs, LOSSES[loss.name].compute(log_probs, make_columns(row, loss, device))

    @staticmethod
    def _take_gradients(tenant: Tenant, sums: list[Tensor]) -> list[Tensor]:
        """Adds the gradients of a micro-batch to `sums` in float32. Returns the sums."""
        found = [
            torch.zeros_like(p, dtype=torch.float32) if p.grad is None else p.grad.float()
            for p in tenant.parameters
        ]
        for parameter in tenant.parameters:
            parameter.grad = None
        if not sums:
            return found
        torch._foreach_add_(sums, found)
        return sums

    @staticmethod
    def _store(
        outputs: list[dict[str, list[float]]],
        members: list[int],
        row: list[TenantDatum],
        loss: LossSpec,
        log_probs: Tensor,
        losses: Tensor,
    ) -> None:
        sizes = [len(datum.tokens) for datum in row]
        for i, of_datum, its_loss in zip(members, log_probs.split(sizes), losses.split(sizes), strict=True):
            outputs[i]["logprobs"] = of_datum.tolist()
            if WEIGHTS in LOSSES[loss.name].per_token:
                outputs[i]["elementwise_loss"] = its_loss.tolist()
