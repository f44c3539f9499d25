"""Predicts the seconds of a training step by part, for a layout of GPUs.

The times of products come from their FLOPs and the GPU's published peak, those of decoding from the bytes that a token
reads, and those of moving weights from their bytes. `Rates` has the measured factors between these bounds and a run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from slime.hardware import Hardware
from slime.models.decoder import Hf
from slime.plan.flops import ForwardFlops
from slime.plan.model_shape import Shape
from slime.plan.units import GIB
from vime.vllm.memory import step_bytes, usual_step

BYTES = 2
"""Bytes of a weight in bfloat16."""


@dataclass(frozen=True)
class Rates:
    """Factors that were fitted to records of benchmarks/results. tests/vime/plan/search/test_step_time.py has the
    records and the predictions, also for the held-out ones."""

    forward: float = 0.52
    """Part of the peak that products of a dense forward pass reach: colocated_qwen3_4b_h200."""
    backward: float = 0.58
    """The same of a backward pass: colocated_qwen3_4b_h200."""
    experts_forward: float = 0.42
    """The same with experts, without the layers' `moe_layer_s`: experts_qwen3_30b_h100, whole_qwen3_30b_h100."""
    experts_backward: float = 0.42
    attention_forward: float = 0.37
    """The same of attention's products: training_qwen3_4b_h200."""
    attention_backward: float = 0.17
    head: float = 0.68
    """The same of head and loss: colocated_qwen3_4b_h200."""
    moe_layer_s: float = 0.0035
    """Seconds that a layer of experts adds to a forward pass of a micro-batch: exchanges and launches."""
    layer_s: float = 0.0006
    """Seconds of launches of a layer per pass and micro-batch, below which a small micro-batch does not go."""
    optimizer_bytes: float = 28.0
    """Bytes that Adam moves per parameter, and the part of the memory's peak that it reaches."""
    optimizer_memory: float = 0.37
    remainders_ratio: float = 2.3
    """Time of Adam with main weights as remainders, divided by its time with float32 main weights:
    remainders_qwen3_4b_h200, colocated_qwen3_4b_h200."""
    host_adam: float = 2.24e9
    """Parameters per second of Adam on a host with 16 cores: host_adam_qwen3_4b_h200."""
    host_adam_power: float = 0.575
    """Twice as many cores update 2 ** 0.575 times as many parameters, because they share the memory's bandwidth:
    whole_qwen3_30b_h200, with 32 cores."""
    decode_step_s: float = 0.0025
    """Seconds of a decoding step without its bytes: rollout_qwen3_4b_h200."""
    decode_sequence_s: float = 0.00002
    """Seconds of a decoding step per sequence: scheduler, sampling and answers to the clients."""
    decode_exchange_s: float = 0.000005
    """Seconds of an exchange between the GPUs of an engine, two per layer. No record measures it alone."""
    decode_memory: float = 0.85
    """Part of the memory's peak that decoding reaches."""
    update_fixed_s: float = 0.12
    update_bytes_s: float = 67e9
    """Bytes per second of new weights in the engines: features_h200, weights_two_h200."""
    update_experts_bytes_s: float = 56e9
    """The same for experts, which have many small tensors: whole_qwen3_30b_h200."""
    move_bytes_s: float = 51e9
    """Bytes per second between GPU and page-locked host memory: offload_qwen3_4b_h200."""
    turn_s: float = 0.2
    """Seconds of a step that no part has: sleep, wake-up, hand-over, metrics."""
    link: float = 0.6
    """Part of NVLink's or the network's peak that collectives reach."""


@dataclass(frozen=True)
class GpuLayout:
    """A layout of GPUs. Trainer ranks = tp * pp * cp * dp. Engines have `engine_gpus` GPUs each."""

    trainer_gpus: int
    engines: int
    engine_gpus: int
    colocated: bool
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    micro_tokens: int = 8192
    recompute: bool = False
    offload: bool | None = False
    """The trainer's state is on the host while engines generate. None: the run decides which parts leave the GPU, from
    its memory."""
    host_adam: float = 0.0
    """Part of Adam that is on the host."""
    remainders: bool = False
    """Main weights on the GPU are remainders of 16 bits."""
    share: float = 0.85
    """Part of a GPU's memory that an engine takes."""
    ahead: int = 0
    """Steps that generation may be ahead of training (--max-staleness)."""

    @property
    def gpus(self) -> int:
        return self.trainer_gpus if self.colocated else self.trainer_gpus + self.engines * self.engine_gpus

    @property
    def dp(self) -> int:
        return self.trainer_gpus // (self.tp * self.pp * self.cp)


@dataclass(frozen=True)
class Model:
    """The sizes of a model that a step's time depends on."""

    hf: Hf = field(compare=False)

    @cached_property
    def shape(self) -> Shape:
        return Shape.of(self.hf)

    @cached_property
    def flops(self) -> ForwardFlops:
        return ForwardFlops(self.hf)

    @cached_property
    def params(self) -> int:
        return self.shape.params

    @cached_property
    def routed(self) -> int:
        """Returns the number of routed experts' parameters."""
        return self.shape.count_params(self.shape.kinds, 0).experts

    @cached_property
    def linear(self) -> float:
        """Returns the FLOPs of the layers' products per token of a forward pass."""
        shape = self.shape
        return 2.0 * shape.active + sum(kind.attention.token_flops for kind in shape.kinds)

    def attention(self, length: float) -> float:
        """Returns the FLOPs of attention's products of a sample."""
        return self.flops(length, 0) - self.linear * length

    @cached_property
    def head(self) -> float:
        """Returns the FLOPs of the head per response token of a forward pass."""
        return self.flops(1, 1) - self.flops(1, 0)

    @cached_property
    def expert_layers(self) -> int:
        return sum(bool(kind.sparse) for kind in self.shape.kinds) if self.shape.experts else 0


@dataclass(frozen=True)
class StepWork:
    """The samples of a step: (prompt tokens, response tokens) per sample."""

    model: Model = field(compare=False)
    samples: tuple[tuple[int, int], ...]

    @cached_property
    def tokens(self) -> int:
        return sum(prompt + response for prompt, response in self.samples)

    @cached_property
    def prompts(self) -> int:
        return sum(prompt for prompt, _ in self.samples)

    @cached_property
    def responses(self) -> int:
        return sum(response for _, response in self.samples)

    @cached_property
    def longest(self) -> int:
        return max(prompt + response for prompt, response in self.samples)

    @cached_property
    def attention(self) -> float:
        """Returns the FLOPs of attention's products in a forward pass."""
        return sum(count * self.model.attention(p + r) for (p, r), count in Counter(self.samples).items())

    @cached_property
    def decoded_length(self) -> float:
        """Returns the mean length of a sequence, over the tokens that are decoded."""
        return sum((p + r / 2) * r for p, r in self.samples) / self.responses

    def rollout(self, engines: int) -> list[tuple[int, int]]:
        """Returns an engine's samples, the longest response first."""
        return sorted(self.samples[::engines], key=lambda sample: -sample[1])


@dataclass(frozen=True)
class PredictedStep:
    """The seconds of a step by part. Parts that run at the same time are not added up."""

    parts: dict[str, float]
    step: float

    @property
    def binds(self) -> str:
        """Returns the part that takes the most time."""
        return max(self.parts, key=lambda name: self.parts[name])


def predict(
    model: Model,
    gpu: Hardware,
    layout: GpuLayout,
    samples: Sequence[tuple[int, int]] | StepWork,
    *,
    per_prompt: int = 8,
    passes: int = 0,
    optimizer_steps: int = 1,
    sequences: int = 256,
    cores: int = 16,
    rates: Rates | None = None,
    rollout_s: float | None = None,
) -> PredictedStep:
    """Returns the times of a step.

    Args:
        samples: (prompt tokens, response tokens) per sample of a step.
        per_prompt: samples per prompt, which an engine computes once.
        passes: forward passes without gradient (reference model, old log-probs).
        optimizer_steps: optimizer steps of a rollout.
        sequences: largest number of requests that an engine runs at the same time.
        cores: CPU cores per GPU.
        rollout_s: the time of the rollout, if it is known from a layout with the same engines.
    """
    rates = rates or Rates()
    work = samples if isinstance(samples, StepWork) else StepWork(model, tuple(samples))
    parts = train_times(model, gpu, layout, work, passes, optimizer_steps, cores, rates)
    training = sum(parts.values())
    if rollout_s is None:
        rollout_s = rollout_time(model, gpu, layout, work, per_prompt, sequences, rates)
    parts["rollout"] = rollout_s
    parts["weights"] = update_time(model, rates)
    parts["turns"] = rates.turn_s
    if layout.offload:
        state = state_bytes(model, layout) * (1 - layout.host_adam)
        parts["offload"] = 2 * state / rates.move_bytes_s
    overlapped = not layout.colocated and layout.ahead > 0
    both = max(parts["rollout"], training) if overlapped else parts["rollout"] + training
    return PredictedStep(parts, both + parts["weights"] + parts["turns"] + parts.get("offload", 0.0))


def add_moves(step: PredictedStep, moved: float, rates: Rates | None = None) -> PredictedStep:
    """Returns the times of a step in which `moved` bytes of each rank's state go to the host and come back."""
    rates = rates or Rates()
    seconds = 2 * moved / rates.move_bytes_s
    return PredictedStep({**step.parts, "offload": seconds}, step.step + seconds)


def train_times(
    model: Model,
    gpu: Hardware,
    layout: GpuLayout,
    work: StepWork,
    passes: int,
    optimizer_steps: int,
    cores: int,
    rates: Rates,
) -> dict[str, float]:
    """Returns the seconds of the trainer's parts. All ranks have equal work."""
    tokens, longest, attention = float(work.tokens), work.longest, work.attention
    products, peak = tokens * model.linear, layout.trainer_gpus * gpu.bf16_flops
    head = work.responses * model.head
    rank_tokens = tokens / (layout.dp * layout.cp)
    micro = max(1, math.ceil(rank_tokens / max(layout.micro_tokens, longest / layout.cp)))
    bubble = 1 + (layout.pp - 1) / micro
    experts = model.expert_layers > 0
    rate = (rates.experts_forward, rates.experts_backward) if experts else (rates.forward, rates.backward)
    launches = micro * model.shape.layers / layout.pp * rates.layer_s
    exchange = micro * model.expert_layers / layout.pp * rates.moe_layer_s * (layout.ep > 1)
    split = split_time(model, gpu, layout, rank_tokens, rates)
    forward = products / peak / rate[0] + attention / peak / rates.attention_forward
    forward = (max(forward, launches) + exchange + split) * bubble
    backward = 2 * products / peak / rate[1] + 2 * attention / peak / rates.attention_backward
    backward = (max(backward, 2 * launches) + exchange + 2 * split) * bubble + forward * layout.recompute
    ranks = layout.trainer_gpus
    params = model.params / ranks
    on_card = (
        params * (1 - layout.host_adam) * rates.optimizer_bytes / gpu.memory_bytes_s / rates.optimizer_memory
    ) * (rates.remainders_ratio if layout.remainders else 1)
    sharing = min(ranks, gpu.gpus_per_node)
    host_rate = rates.host_adam * (cores * sharing / 16) ** rates.host_adam_power
    on_host = params * sharing * layout.host_adam / host_rate
    split_over = layout.tp * layout.pp
    reduced = (model.params - model.routed) / split_over if layout.dp * layout.cp > 1 else 0.0
    if layout.trainer_gpus > layout.pp * layout.ep:  # several ranks have the same experts
        reduced += model.routed / (layout.pp * layout.ep)
    reduce = 2 * 4 * reduced / (link_speed(gpu, ranks) * rates.link)
    return {
        "forward": forward * (1 + passes),
        "backward": backward,
        "head and loss": 3 * head / peak / rates.head,
        "optimizer": optimizer_steps * (on_card + on_host),
        "gradients": optimizer_steps * reduce,
    }


def split_time(model: Model, gpu: Hardware, layout: GpuLayout, tokens: float, rates: Rates) -> float:
    """Returns the seconds that tensor and context parallelism exchange activations in a forward pass of `tokens`."""
    shape, seconds = model.shape, 0.0
    speed = link_speed(gpu, layout.tp * layout.cp) * rates.link
    if layout.tp > 1:
        moved = 4 * tokens * shape.hidden * BYTES * (layout.tp - 1) / layout.tp
        seconds += shape.layers / layout.pp * moved / speed
    if layout.cp > 1:
        seconds += shape.layers / layout.pp * 4 * tokens * shape.hidden * BYTES / speed
    return seconds


def link_speed(gpu: Hardware, ranks: int) -> float:
    """Returns the bytes per second between `ranks` GPUs: NVLink's if it connects all, else the network's."""
    return gpu.nvlink_bytes_s if gpu.nvlink_bytes_s and ranks <= gpu.nvlink_domain else gpu.network_bytes_s


def rollout_time(
    model: Model,
    gpu: Hardware,
    layout: GpuLayout,
    work: StepWork,
    per_prompt: int,
    sequences: int,
    rates: Rates,
) -> float:
    """Returns the seconds until the last response of an engine's share. An engine runs at most `sequences` requests at
    the same time, and starts the next one when a request ends. If generation runs ahead, engines do not wait for the
    longest response, and the result is the time in which they generate the tokens of a step."""
    count = len(work.samples)
    sequences = most_sequences(model, gpu, layout, work.tokens / count, sequences)
    seconds = work.prompts / layout.engines / per_prompt * model.linear
    seconds /= layout.engine_gpus * gpu.bf16_flops * rates.forward
    if layout.ahead:
        busy = max(1.0, min(sequences, (1 + layout.ahead) * count / layout.engines))
        token_s = decode_time(model, gpu, layout, busy, busy * work.decoded_length, rates)
        return seconds + work.responses / layout.engines / busy * token_s
    mine = work.rollout(layout.engines)
    running: list[tuple[float, float]] = []  # (remaining tokens, present length) per sequence
    waiting = [(float(response), float(prompt)) for prompt, response in mine]
    while waiting or running:
        free = sequences - len(running)
        running, waiting = running + waiting[:free], waiting[free:]
        steps, count = min(left for left, _ in running), len(running)
        tokens = sum(length + steps / 2 for _, length in running)
        seconds += steps * decode_time(model, gpu, layout, count, tokens, rates)
        running = [(left - steps, length + steps) for left, length in running if left > steps]
    return seconds


def decode_time(
    model: Model, gpu: Hardware, layout: GpuLayout, count: float, tokens: float, rates: Rates
) -> float:
    """Returns the seconds in which an engine decodes a token for each of `count` sequences, which have `tokens` tokens
    together."""
    read = decode_weights(model, count) + model.shape.cache * BYTES * tokens
    seconds = rates.decode_step_s + count * rates.decode_sequence_s
    if layout.engine_gpus > 1:
        seconds += 2 * model.shape.layers * rates.decode_exchange_s
    return seconds + read / (gpu.memory_bytes_s * layout.engine_gpus * rates.decode_memory)


def most_sequences(model: Model, gpu: Hardware, layout: GpuLayout, tokens: float, sequences: int) -> int:
    """Returns the requests of `tokens` tokens that an engine runs at the same time: those whose keys and values fit in
    its share with weights and activations, and at most `sequences`."""
    memory = gpu.memory_gib * GIB
    cache_and_weights = layout.share * memory - step_bytes(model.shape, *usual_step(memory, gpu.name))
    free = layout.engine_gpus * cache_and_weights - model.params * BYTES
    return (
        max(1, min(sequences, int(free / (model.shape.cache * BYTES * tokens))))
        if model.shape.cache
        else sequences
    )


def decode_weights(model: Model, count: float) -> float:
    """Returns the bytes of weights that a decoding step of `count` sequences reads: all dense weights, and the experts
    that a token chose, if the choices are even."""
    shape, routed = model.shape, model.routed
    chosen = 1 - (1 - shape.topk / shape.experts) ** count if shape.experts else 0.0
    return float(BYTES * (model.params - routed + routed * chosen))


def update_time(model: Model, rates: Rates) -> float:
    dense, routed = (model.params - model.routed) * BYTES, model.routed * BYTES
    return rates.update_fixed_s + dense / rates.update_bytes_s + routed / rates.update_experts_bytes_s


def state_bytes(model: Model, layout: GpuLayout) -> float:
    """Returns the bytes of a rank's state that --offload-train moves: weights, and Adam with its main weights."""
    adam = 10 if layout.remainders else 12
    return model.params / (layout.tp * layout.pp) * BYTES + model.params / layout.trainer_gpus * adam
