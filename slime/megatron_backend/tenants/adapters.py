"""The adapters of tenants over one model: which of them the model computes with, and their float32 copies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slime.megatron_backend.lora.install import (
    Adapters,
    AnyAdapter,
    attach,
    find_owners,
    make_adapters,
    products,
)
from slime.models.lora import ALL, Lora
from slime.protocols.tenants import AdamParams, TenantSpec


class Switch:
    """The place of a product where an adapter can be. The product adds the output of `current`, if there is one."""

    def __init__(self) -> None:
        self.current: AnyAdapter | None = None

    def added(self, output: Tensor, *inputs: Tensor) -> Tensor:
        return output if self.current is None else self.current.added(output, *inputs)


def add_switches(inner: nn.Module) -> dict[str, Switch]:
    """Returns a switch per product of the model that can have an adapter, by the product's name in `Adapters`."""
    owners, found = find_owners(inner), dict[str, Switch]()
    for path, row, _, weights in products(inner):
        name = path.replace(".", "/")
        found[name] = Switch()
        attach(owners[id(weights[0])], name, found[name].added, experts=row.is_expert)
    return found


def make_lora(inner: nn.Module, spec: TenantSpec, most_rank: int) -> Lora:
    """Returns the adapters that a tenant asks for. Raises ValueError for a rank that is not served, or for no
    module."""
    if not 1 <= spec.rank <= most_rank:
        raise ValueError(
            f"the rank must be 1 to {most_rank}, the largest of this service, got {spec.rank}; choose a smaller one"
        )
    if not (spec.train_attn or spec.train_mlp):
        raise ValueError(
            "an adapter must train attention or MLP, got neither; set train_attn or train_mlp, because the head has no "
            "adapter here"
        )
    if spec.train_attn and spec.train_mlp:
        return Lora(spec.rank, spec.alpha)
    modules = [module for _, _, of_product, _ in products(inner) for module in of_product]
    names = {module.rpartition(".")[2] for module in modules if ("attn" in module) == spec.train_attn}
    if not names:
        raise ValueError("the model must have modules of the chosen kind, got none; train attention and MLP")
    return Lora(spec.rank, spec.alpha, targets=tuple(sorted(names)) if names else (ALL,))


class Tenant:
    """An adapter with its gradients and its state of Adam.

    `masters` are the float32 values of `parameters`, which have the model's dtype. `gradients` are the sums of all
    passes since the last step, in float32; None without a pass.
    """

    def __init__(self, inner: nn.Module, spec: TenantSpec, lora: Lora, seed: int) -> None:
        self.spec = spec
        self.adapters: Adapters = make_adapters(inner, lora, seed)
        self.adapters.base = None
        self.names = [name for name, _ in self.adapters.named_parameters()]
        self.parameters = [p.requires_grad_(True) for p in self.adapters.parameters()]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.gradients: list[Tensor] | None = None
        self.optimizer = self._adam()

    def _adam(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.masters, foreach=True)

    def count_bytes(self) -> int:
        """Returns the bytes that this tenant has on the device: values, their float32 copies, gradients and moments."""
        states = self.optimizer.state.values()
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        tensors = [*self.parameters, *self.masters, *(self.gradients or []), *moments]
        return sum(x.numel() * x.element_size() for x in tensors)

    def add_gradients(self, added: list[Tensor]) -> None:
        if self.gradients is None:
            self.gradients = added
        else:
            torch._foreach_add_(self.gradients, added)

    def step(self, params: AdamParams) -> dict[str, float]:
        """Runs Adam with decoupled weight decay, and clears the gradients. Returns the norm of the gradients before
        clipping. Raises ValueError if it is not finite; the values stay as they were."""
        gradients = self.gradients or [torch.zeros_like(m) for m in self.masters]
        self.gradients = None
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        if not norm.isfinite():
            raise ValueError(
                f"gradients must be finite, got norm {norm.item()}; they were dropped, lower the learning rate or "
                "check the inputs of the loss"
            )
        if params.grad_clip_norm > 0:
            torch._foreach_mul_(gradients, (params.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0))
        (group,) = self.optimizer.param_groups
        group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
        group |= {"eps": params.eps, "weight_decay": params.weight_decay}
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()
        return {"grad_norm": norm.item()}

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the float32 values to the parameters with which the model computes."""
        torch._foreach_copy_(self.parameters, self.masters)

    def state(self, *, optimizer: bool) -> dict[str, Tensor]:
        """Returns the values by name, and with `optimizer` Adam's moments and number of steps."""
        found = dict(zip((f"value/{name}" for name in self.names), self.masters, strict=True))
        if optimizer:
            for name, master in zip(self.names, self.masters, strict=True):
                found |= {f"{key}/{name}": x for key, x in self.optimizer.state.get(master, {}).items()}
        return found

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], *, optimizer: bool) -> None:
        """Replaces the values, and with `optimizer` Adam's state. Without it, Adam starts new."""
        self.gradients = None
        self.optimizer = self._adam()
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[f"value/{name}"])
            moments = {
                key: tensors[f"{key}/{name}"]
                for key in ("step", "exp_avg", "exp_avg_sq")
                if optimizer and f"{key}/{name}" in tensors
            }
            if moments:
                self.optimizer.state[master] = {
                    key: x.clone() if key == "step" else x.to(master.device, copy=True)
                    for key, x in moments.items()
                }
        self.publish()
