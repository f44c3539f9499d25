"""Memory of a trainer rank, computed from shapes: the state that it keeps, and the memory that a step adds.

The estimate adds up tensors as the trainer allocates them. `vime plan` prints it, and a run logs its measured peaks
next to it. slime.plan.memory_decision uses it for its decisions. The module imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from slime.algo.losses import loss_for
from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.models.decoder import Hf
from slime.models.lora import Lora, sends_adapters
from slime.models.selection import Selection
from slime.operators import NATIVE, PROVIDER, VALUES, loss_head
from slime.plan.adapter_params import adapter_params
from slime.plan.layer_elements import count_stored_layers, expert_flight, layer_width, mlp_flight
from slime.plan.model_shape import Shape
from slime.plan.rank_params import rank_params
from slime.plan.rounded_operands import kept_weights, rounded_bytes
from slime.plan.stages import build_stages, micro_batch_group
from slime.plan.step_memory.optimizer_state import muon_step, optimizer_state
from slime.plan.step_memory.selection_memory import selection_memory
from slime.plan.tower import run_tower, tower_memory
from slime.plan.trained_params import list_end_matrices, trained_params
from slime.plan.units import BYTES, GIB, amount, count
from slime.roles import POLICY, Role, get_roles
from slime.system import delta_nets
from slime.weight_sync.registry import CHANNELS

ACTIVATIONS = "inputs of layers"
"""Name of the activations that are on the host."""


@dataclass(frozen=True)
class Item:
    """One line of an estimate."""

    name: str
    bytes: float
    arithmetic: str
    """Arithmetic of the bytes, as text."""
    part: str | None = None
    """Name of the part in --offload-train-parts."""
    of: Role | None = None
    """The trained role to which the state belongs."""


@dataclass(frozen=True)
class Estimate:
    """The memory of a trainer rank."""

    shape: Shape
    """Shape of the model."""
    kept: tuple[Item, ...]
    """Items that stay while the trainer runs."""
    work: tuple[Item, ...]
    """Items that are added to `kept`, one at a time."""
    host: tuple[Item, ...] = ()
    """Items that the rank keeps on the host instead of the device."""

    @property
    def peak(self) -> float:
        """Returns the bytes at the peak of a step."""
        return self.peak_with(())

    def peak_with(self, leaving: Collection[str]) -> float:
        """Returns the peak if each trained role's parts `leaving` are on the device only during the role's turn. The
        policy's weights stay, because its pass comes before the other roles' training."""
        turns = {item.of for item in self.kept if item.of is not None} or {POLICY}
        kept = max(
            sum(
                item.bytes
                for item in self.kept
                if item.of in (None, turn)
                or item.part not in leaving
                or (item.of is POLICY and item.part == "parameters")
            )
            for turn in turns
        )
        return kept + max((item.bytes for item in self.work), default=0.0)

    def sum_part(self, part: str) -> float:
        return sum(item.bytes for item in self.kept if item.part == part)

    def sum_moved(self, leaving: Collection[str]) -> float:
        """Returns the bytes that go to the host when the parts `leaving` leave the device. Gradients are not needed
        between two training steps, so they are freed."""
        return sum(self.sum_part(part) for part in leaving if part != "gradients")

    def compared(self, perf: dict[str, float], leaving: Collection[str] = ()) -> dict[str, float]:
        """Returns the estimate next to the measured peak in a step's `perf`. Empty if no peak was measured."""
        if (peak := perf.get("perf/trainer_peak_gib")) is None:
            return {}
        expected = self.peak_with(leaving) / GIB
        return {"perf/memory/estimate_gib": expected, "perf/memory/peak_of_estimate": peak / expected}

    def left(self, leaving: Collection[str]) -> float:
        """Returns the bytes on the device between two training steps, with the parts `leaving` on the host."""
        return sum(item.bytes for item in self.kept if item.part not in leaving)


def estimate(c: Config, hf_config: Hf) -> Estimate:
    """Returns the memory of a trainer rank in the pipeline stage with the most parameters."""
    shape = Shape.of(hf_config)
    kept, work = list_role_states(c, shape), work_memory(c, shape)
    host = [*host_memory(c, shape), *host_activations(c, shape)]
    return Estimate(shape, tuple(kept), tuple(work), tuple(host))


def list_role_states(c: Config, shape: Shape) -> Iterator[Item]:
    """Yields the state of every role, the policy's first."""
    roles = sorted(get_roles(c), key=lambda role: role is not POLICY)
    for role in roles:
        yield from role_memory(c, role_shape(c, role, shape), role)
    size = BYTES[c.megatron.params_dtype]
    sends = roles[0] is POLICY and c.num_engines
    if CHANNELS[c.weight_update.update_weight_transport].buckets and sends:
        largest = 0 if sends_adapters(c) else shape.vocab * shape.hidden * size
        bucket = max(c.weight_update.update_weight_buffer_size, largest)
        how = "2, each --update-weight-buffer-size" + ("" if sends_adapters(c) else " or the embedding")
        yield Item("update buckets", 2 * bucket, how)


def role_shape(c: Config, role: Role, policy: Shape) -> Shape:
    """Returns the shape of a role's model. A teacher may have another model than the policy."""
    directory = role.shape(c)
    return policy if directory == c.rollout.hf_checkpoint else Shape.of(read_hf_config(directory))


def role_memory(c: Config, shape: Shape, role: Role) -> Iterator[Item]:
    """Yields the state of a role: weights, gradients, and the optimizer's state (`optimizer_state`)."""
    size, grad = BYTES[c.megatron.params_dtype], grad_bytes(c)
    kinds = list(
        rank_params(c, shape, predicts=None if role is POLICY else False, head=not role.has_values(c))
    )
    of_role = "" if role is POLICY else f"{role.name} "
    weights = f"{of_role}weights" if role.trained else role.name
    of = role if role.trained else None
    if role.of_base(c):
        return
    for kind, params, share, ranks, *_ in kinds:
        yield Item(f"{kind}{weights}", params * size, f"{share} x {size} B{ranks}", "parameters", of)
    if not role.trained:
        return
    trained = list(
        rank_params(
            c, shape, predicts=None if role is POLICY else False, head=not role.has_values(c), trained=True
        )
    )
    if c.lora.lora_rank:
        for kind, params, share, ranks, *_ in trained:
            yield Item(
                f"{kind}{of_role}adapters", params * size, f"{share} x {size} B{ranks}", "parameters", of
            )
    for kind, params, share, ranks, *_ in trained:
        yield Item(f"{kind}{of_role}gradients", params * grad, f"{share} x {grad} B{ranks}", "gradients", of)
    left = on_device(c)
    for one in trained:
        state, how = optimizer_state(c, one)
        how = f"{how} / {one.shards} shards{_part(left)}"
        yield Item(f"{one.kind}{of_role}optimizer", state / one.shards * left, how, "optimizer", of)


def on_device(c: Config) -> float:
    """Returns the part of the weights whose optimizer is on the device, see --optimizer-cpu-offload."""
    return 1 - c.megatron.optimizer_offload_fraction if c.megatron.optimizer_cpu_offload else 1.0


def _part(fraction: float) -> str:
    return "" if fraction == 1 else f" x {fraction:g}"


def host_memory(c: Config, shape: Shape) -> Iterator[Item]:
    """Yields the host memory of --optimizer-cpu-offload: fp32 main weights and two moments, unless these are in files,
    and the buffers in which gradients arrive (`slime.megatron_backend.model.host_adam`: 3 buffers of 256 MiB, or of
    --offload-train-disk-chunk-mb, or of the embedding's gradients)."""
    if (moved := 1 - on_device(c)) == 0:
        return
    total = 0.0
    for role in get_roles(c):
        if role.trained:
            of_role = "" if role is POLICY else f"{role.name} "
            for kind, params, share, ranks, shards, _ in rank_params(
                c,
                shape,
                predicts=None if role is POLICY else False,
                head=not role.has_values(c),
                trained=True,
            ):
                how = f"{share} x 12 B{ranks} / {shards} shards{_part(moved)}"
                total += params / shards * moved
                if not c.megatron.stream_optimizer_state_to_disk:
                    yield Item(f"{kind}{of_role}optimizer", params * 12 / shards * moved, how)
    mib = c.megatron.offload_train_disk_chunk_mb if c.megatron.stream_optimizer_state_to_disk else 256
    embedding = 4 * shape.vocab * shape.hidden / c.megatron.tensor_model_parallel_size
    each = min(max(mib * 2**20, embedding), 4 * total)
    number = min(3, math.ceil(4 * total / (mib * 2**20)))
    yield Item("gradients of Adam", number * each, f"{number} buffers of {amount(each)}, pinned")


def host_activations(c: Config, shape: Shape) -> Iterator[Item]:
    """Yields the host memory of --cpu-offloading: the input of each layer. torch rounds pinned memory up to a power of
    two."""
    tokens = micro_batch_tokens(c)
    if not c.megatron.cpu_offloading or tokens is None:
        return
    one = tokens * BYTES[c.megatron.params_dtype] * shape.hidden / _sequence_split(c)
    layers, _ = count_stored_layers(c, shape, lambda kind: 1.0)
    pinned = 2 ** math.ceil(math.log2(one))
    how = f"{layers + 1:.4g} x {amount(one)} of {count(tokens)} tokens, pinned"
    yield Item(ACTIVATIONS, (layers + 1) * pinned, how)


def work_memory(c: Config, shape: Shape) -> Iterator[Item]:
    """Yields the memory in addition to the state, for each moment of a step that may be the peak."""
    size, tp = BYTES[c.megatron.params_dtype], c.megatron.tensor_model_parallel_size
    if (tokens := micro_batch_tokens(c)) is not None:
        kept, one = activation_memory(c, shape, tokens)
        split = tp if c.megatron.sequence_parallel else 1
        flight = mlp_flight(shape, tokens, tp, split)
        evenly = ""
        sparse = [kind.sparse for kind in shape.kinds]
        if any(sparse):
            flight = max(flight * any(kind.dense for kind in shape.kinds), expert_flight(c, shape, tokens))
            evenly = " and stacked weights, if tokens spread evenly over experts"
        flight = max(flight, tokens * _scanned(c, shape) / tp * BYTES["float32"] / size)
        back = f"{kept.arithmetic} + {amount(one)} of one layer + {amount(flight * size)} of its gradients{evenly}"
        rounded, form = rounded_bytes(c, shape, tokens)
        if rounded:
            back += f" + {amount(rounded)} of operands in {form}"
        weights = kept_weights(c, shape)
        more = f" + {amount(weights)} of weights in {form}" if weights else ""
        yield Item("layers, backward", kept.bytes + one + flight * size + rounded + weights, back + more)
        selecting, how = selection_memory(c, shape, tokens, size)
        if selecting:
            start = min(
                one, 2 * tokens * shape.hidden * size
            )  # recomputation rebuilds the layer's first norm
            how = f"{amount(kept.bytes)} of {kept.name} + {amount(start)} of one layer + {how}"
            yield Item("selection of tokens", kept.bytes + start + selecting + weights, how + more)
        head, how = head_memory(c, shape, tokens)
        # Recomputation of layers starts only after the head.
        how = f"{amount(kept.bytes)} of {kept.name} + {how}{more}"
        yield Item("head and loss", kept.bytes + head + weights, how)
    rows = trained_params(Selection.of(c), shape, (), list_end_matrices(shape, first=True, last=False)).split
    yield Item("embedding gradient", rows * size / tp, f"{count(rows)} x {size} B / TP {tp}")
    step, arithmetic = 0.0, []
    if grad_bytes(c) < 4 and (left := on_device(c)) and not c.megatron.stores_remainders:
        for kind in rank_params(c, shape, trained=True):
            step += kind.params * 4 / kind.shards * left
            arithmetic.append(f"{kind.share} x 4 B{kind.ranks} / {kind.shards} shards, gradients in fp32")
    if c.megatron.stores_remainders:
        # slime.megatron_backend.model.remainders: main weights of a slice, their bits, and both parts of the result
        step += (4 + 4 + 2 + 2) * 2**25
        arithmetic.append("34 M x 12 B, main weights of a slice and their parts")
    if c.megatron.optimizer == "muon":
        largest, how = muon_step(c, shape)
        step, arithmetic = step + largest, [*arithmetic, how]
    if step:
        yield Item("optimizer step", step, " + ".join(arithmetic))


def _scanned(c: Config, shape: Shape) -> int:
    """Returns the elements that the backward of a recurrent layer makes per token in float32. Without a GPU of this
    host to ask, the plan assumes the generation that refuses more versions of Triton."""
    kernels = c.cluster.device == "cuda" and delta_nets.local_obstacle(hopper=True) is None
    plain = (kind for kind in shape.kinds if not (kernels and kind.kind == "gated_delta_net"))
    return max((kind.attention.scanned for kind in plain), default=0)


def grad_bytes(c: Config) -> int:
    return 4 if c.megatron.overrides.get("grad_reduce_in_fp32", True) else BYTES[c.megatron.params_dtype]


def longest_sample(c: Config) -> int:
    """Returns the tokens of a sample on one rank, as far as flags limit them. A micro-batch has at least one sample."""
    longest = c.rollout.rollout_max_context_len or (c.rollout.rollout_max_response_len or 0)
    return -(-longest // c.megatron.context_parallel_size)


def micro_batch_tokens(c: Config) -> int | None:
    """Returns the most tokens of a micro-batch on one rank, or None if no length has a limit. A sample that is longer
    than --max-tokens-per-gpu is alone in its micro-batch."""
    if c.data.use_dynamic_batch_size:
        return max(c.data.max_tokens_per_gpu or 0, longest_sample(c))
    prompt, response = c.rollout.rollout_max_prompt_len, c.rollout.rollout_max_response_len
    both = None if prompt is None or response is None else prompt + response
    longest = c.rollout.rollout_max_context_len or both
    return None if longest is None else longest * c.data.micro_batch_size // c.megatron.context_parallel_size


def _sequence_split(c: Config) -> int:
    return c.megatron.tensor_model_parallel_size if c.megatron.sequence_parallel else 1


def activation_memory(c: Config, shape: Shape, tokens: int) -> tuple[Item, float]:
    """Returns the activations that the forward keeps for the backward, and the bytes of the layer that full
    recomputation rebuilds.

    The numbers below are elements per token. Norm inputs: 2 H, and 2 H more for norms of the outputs. Attention (q, k,
    v, tensors kept by norm and rotation, the output): 4 q + 4 kv. Gated MLP: 2 F, and F more for silu(gate) if
    rl_kernel's kernel does not compute it. Attention and MLP are split over tensor parallelism; the norm inputs too
    with --sequence-parallel. Outputs of norms and of the MLP's activation are computed again
    (slime.megatron_backend.model.layers), except by Transformer Engine, and in the layer that full recomputation runs
    again.

    A sparse layer keeps the output of the second norm, and for a shared expert the same as for an MLP. For each copy of
    a token that goes to an expert it keeps the copy (H), and gate, up, activation and weighted activation (4 F or 5 F
    of the expert's width). With full recomputation, only the layer inputs stay. The first of P pipeline stages keeps P
    micro-batches of its layers, and more with virtual stages (`Stages.passes`). A layer of multi-token prediction
    counts as one more layer of the last stage. `exchanged_elements` are those of context parallelism. A prompt that
    samples share counts once per sample: the estimate is for samples that share no prompt. In a run with images, all
    tokens count as image tokens (`tower_memory`).
    """
    size, split = BYTES[c.megatron.params_dtype], _sequence_split(c)
    full = c.megatron.overrides.get("recompute_granularity") == "full"
    layers, width = count_stored_layers(
        c, shape, lambda kind: shape.hidden / split if full else layer_width(c, shape, kind)
    )
    if c.megatron.cpu_offloading:
        layers = 1  # the input that the backward has fetched
    how = f"{count(tokens)} tokens x {size} B x {layers:.4g} layers x {width:.0f}"
    one = tokens * size * max(layer_width(c, shape, kind) for kind in shape.kinds) if full else 0.0
    kept = Item("activations", tokens * size * layers * width, how)
    if (vision := run_tower(c, shape.hf)) is not None:
        more, text = tower_memory(c, vision, tokens, size)
        kept = Item("activations and images", kept.bytes + more, f"{how} + {text}")
    if (
        c.off_policy.use_rollout_routing_replay
    ):  # int16, of all layers on every stage (slime.data.routed_experts)
        stages, group = build_stages(c.megatron, shape.layers), micro_batch_group(c.megatron, shape.layers)
        ids = tokens * shape.layers * shape.topk * 2 * stages.micro_batches(0, group)
        kept = Item(
            "activations and experts' ids",
            kept.bytes + ids,
            f"{kept.arithmetic} + {amount(ids)} of experts' ids",
        )
    return kept, one


def head_memory(c: Config, shape: Shape, tokens: int) -> tuple[float, str]:
    """Returns the bytes of the output layer and the loss if all tokens are responses: logits with their gradients, or
    the workspace limit of the linear operators and their rows of the hidden states, forward and backward."""
    size, columns = BYTES[c.megatron.params_dtype], shape.vocab / c.megatron.tensor_model_parallel_size
    head, _ = loss_head(c)
    if not head.has_logits:
        rows = 2 * tokens * shape.hidden * size
        if head == VALUES:
            return rows, f"{amount(rows)} of hidden states"
        if c.cluster.device != "cuda":  # the references work in one block of float32
            how = f"{count(tokens)} tokens x {columns:.0f} columns x 8 B, references"
            return rows + tokens * columns * 8, how
        workspace = c.kernels.rl_kernel_workspace_mib * 2**20
        return workspace + rows, f"--rl-kernel-workspace-mib + {amount(rows)} of hidden states"
    each = native_logit_bytes(c) if head in (NATIVE, PROVIDER) else 2 * size  # logits and their gradient
    return tokens * columns * each, f"{count(tokens)} tokens x {columns:.0f} columns x {each} B"


def native_logit_bytes(c: Config) -> int:
    """Returns the bytes per logit of a response in plain PyTorch (slime.megatron_backend.step.native), at the peak.

    Conversion to float32: Megatron's logits and the responses' rows of the logits in the model's dtype, and the rows in
    float32. Then the float32 logits z stay, and with a temperature also the logits before the division. The entropy
    adds `z - max`, its exp, and their product: 4 + 12 B. Cross entropy works in place. If the loss has the entropy, its
    softmax and log-probs stay, and its gradient (the product of two temporaries) exists together with the cross
    entropy's gradient: 2 x 4 + 3 x 4 + 4 B. The memory of a --custom-loss-function-path is unknown, and so is the
    memory of a --selected-logprob-provider.
    """
    size = BYTES[c.megatron.params_dtype]
    if not loss_for(c.algorithm).entropy:
        return 2 * size + (4 if size < 4 else 0)
    return max(16 + (4 if c.rollout.rollout_temperature != 1 else 0), 24 if c.algorithm.entropy_coef else 0)


def adapters_sent(c: Config, shape: Shape) -> str:
    """Returns the bytes of an update that sends only adapters, and the bytes of all weights, as the end of a line."""
    lora, size = Lora.of(c), BYTES[c.megatron.params_dtype]
    if lora is None or not sends_adapters(c):
        return ""
    alone = adapter_params(lora, shape.hf, range(shape.layers)).total * size
    return f"; adapters of rank {lora.rank} alone, {amount(alone)} in place of {amount(shape.params * size)}"
