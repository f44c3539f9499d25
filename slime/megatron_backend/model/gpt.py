"""The GPT model of a checkpoint, or this rank's pipeline stage of the model. The output is hidden states.
`compute_logits` computes logits.

    tokens, layout -> stage_output -> [last stage] gather_hidden, or compute_logits

Shapes: P rows of packed tokens, H hidden, V_local vocabulary rows of this tensor-parallel rank (padding included).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from slime.checkpoints.quantized_files import read_quantized_weights
from slime.config import Config
from slime.config.problems import require_value
from slime.megatron_backend.model import transformer_engine
from slime.megatron_backend.model.attention import PackedLayout, RotaryAngles
from slime.megatron_backend.model.layer_spec import layer_spec
from slime.megatron_backend.model.model_config import padded_vocab_size, transformer_config
from slime.megatron_backend.model.moe.expert_dispatch import share_longest
from slime.megatron_backend.model.norms import RMSNorm
from slime.megatron_backend.model.parameter_names import freeze
from slime.megatron_backend.model.prediction_layer import prediction_spec
from slime.megatron_backend.model.products.fp8 import use_fp8
from slime.megatron_backend.model.products.rounded import round_weights
from slime.megatron_backend.model.value_head import ValueHead
from slime.megatron_backend.model.vision.embeddings import embed_images
from slime.megatron_backend.model.vision.towers import build_tower
from slime.megatron_backend.parallel import built
from slime.models import Decoder, family_for, read_decoder
from slime.models.layouts import Sizes
from slime.models.rope import Rope
from slime.models.vision import sees_images

Angles = Callable[[Rope, Tensor], tuple[Tensor, Tensor]]
"""Maps (rotary embedding, positions [P]) to cos and sin, fp32 [P, 1, R/2]."""


class HiddenGPTModel(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's GPTModel, but `forward` stops before the output layer: hidden states after the final norm.

    `build_model` builds it. `hf_config` is the checkpoint's config.json, `described` is its decoder, and `sizes` are
    the sizes for weight layouts. `virtual` is the index of the virtual stage on this rank. None if the rank has one
    stage. `value`: a critic, whose last stage has a `value_head` instead of the output layer. `mtp` has the layers of
    multi-token prediction, in a model that trains them. `forward` does not run them,
    `slime.megatron_backend.step.prediction` does. `has_tower`: the first
    stage has the vision tower, `vision_model`. `keeping` makes the context in which tensors are saved for the backward.
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        core: TransformerConfig,
        sizes: Sizes,
        virtual: int | None = None,
        *,
        value: bool = False,
        has_tower: bool = False,
    ) -> None:
        described = read_decoder(hf_config)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
        super().__init__(
            core,
            _block_spec(core, described, virtual),
            vocab_size=sizes.padded_vocab,
            max_sequence_length=described.context,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=last,
            share_embeddings_and_output_weights=described.tied and not value,
            position_embedding_type="none",  # PackedAttention applies it
            vp_stage=virtual,
            mtp_block_spec=prediction_spec(core, described) if core.mtp_num_layers and last else None,
        )
        if self.mtp_process and not self.pre_process and described.tied:
            # the head is this stage's copy of the embedding; Megatron creates a second matrix here, which is unused
            self.output_layer.register_parameter("weight", None)
        self.hf_config, self.sizes, self.described, self.value = hf_config, sizes, described, value
        self.angles: Angles = Rope.angles
        self.keeping: Callable[[], AbstractContextManager[None]] = nullcontext
        if value and last:
            del self.output_layer
            self.post_process = (
                False  # Megatron's name for an output layer; the decoder has its own flag for the final norm
            )
            self.value_head = ValueHead(core.hidden_size)
        if self.pre_process and described.embedding_scale != 1:
            self.embedding.register_forward_hook(_scaled(described.embedding_scale))
        # Megatron moves its own matrices to the device, but leaves torch's norms on the host in fp32
        self.to(torch.cuda.current_device(), core.params_dtype)
        self.has_tower = has_tower and described.vision is not None
        self.vision_model: nn.Module | None = None
        if has_tower and described.vision is not None and self.pre_process:
            self.vision_model = build_tower(
                described.vision, core.params_dtype, recompute=core.recompute_granularity == "full"
            )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedLayout,
    ) -> Tensor:
        """Maps input_ids [1, P] to hidden states [P, 1, H] of this stage, or this rank's [P / TP, 1, H] with sequence
        parallelism. Stages after the first read their input from `set_input_tensor`, not from `input_ids`."""
        layout = packed_seq_params
        images = layout.images
        axes = None if images is None else images.positions
        layout.rotary = self.rotary(layout.positions if axes is None else axes)
        embedded = self._embed(input_ids, layout) if self.pre_process else None
        with self.keeping():
            hidden: Tensor = super().forward(
                input_ids, position_ids, attention_mask, decoder_input=embedded, packed_seq_params=layout
            )
        return hidden

    def _embed(self, input_ids: Tensor, layout: PackedLayout) -> Tensor | None:
        """Returns the embeddings with images. Returns None for a model without a tower, which embeds tokens itself."""
        if self.vision_model is None:
            if layout.images is not None:
                raise ValueError(
                    "samples must have no images in a run without --multimodal-keys, got images; give the flag, and "
                    "the trainer builds the vision tower of --hf-checkpoint"
                )
            return None
        assert self.described.vision is not None
        embedded = self.embedding(input_ids=input_ids, position_ids=None)
        parallel = self.config.sequence_parallel
        return embed_images(
            embedded, layout, self.described.vision, self.vision_model, sequence_parallel=parallel
        )

    def _set_attention_backend(self) -> None:
        """Sets the variables NVTE_* for Transformer Engine. Other layers read none, so values in the environment are no
        error there."""
        if self.config.transformer_impl == "transformer_engine":
            super()._set_attention_backend()

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def rotary(self, positions: Tensor) -> list[RotaryAngles]:
        """Returns cos and sin of the model's rotary embeddings for positions [P]. `Layer.rope` is an index in the
        list."""
        return [
            RotaryAngles(*self.angles(rope, positions), interleaved=rope.interleaved)
            for rope in self.described.ropes
        ]


def _scaled(factor: float) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Returns a hook that multiplies a module's output by `factor`, rounded to the output's dtype as checkpoints
    expect."""
    return lambda module, inputs, output: output * torch.tensor(factor, dtype=output.dtype)


def _block_spec(
    core: TransformerConfig, described: Decoder, virtual: int | None
) -> TransformerBlockSubmodules:
    if core.transformer_impl == "transformer_engine":
        return transformer_engine.block_spec(core, described, virtual)
    first, count = get_transformer_layer_offset(core, virtual), get_num_layers_to_build(core, virtual)
    layers = [layer_spec(core, described, layer) for layer in described.layers[first : first + count]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def build_model(
    hf_config: dict[str, Any],
    config: Config,
    *,
    ddp: bool = True,
    predicts: bool = False,
    value: bool = False,
    has_tower: bool | None = None,
    adapt: Callable[[list[nn.Module]], None] | None = None,
) -> nn.Module:
    """Returns the model of a checkpoint on this rank, with uninitialised parameters. Fill them with `load_hf` or
    `load_checkpoint`.

    `config` supplies the parallel layout, precision and Megatron flags. With `ddp`, the model is wrapped in Megatron's
    DistributedDataParallel, which sums (and does not average) its fp32 gradient buffers over data-parallel ranks.
    Parameters that are frozen by name have no gradient buffer. Without `ddp`, the model has no gradients (reference
    model). With `predicts`, the model has its layers of multi-token prediction. With `value`, it has a value head
    instead of logits (critic). With `has_tower`, it has the vision tower (default: if the run's prompts have images).
    `adapt` adds adapters to the parts. With virtual stages, the result is `Parts`, and each part has its own wrapper.
    Call `init_parallel` first; `destroy_parallel` empties the model.
    """
    core = transformer_config(hf_config, config, predicts=predicts)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    vocab = hf_config["vocab_size"]
    flags = config.megatron
    padded = flags.padded_vocab_size or padded_vocab_size(vocab, flags.make_vocab_size_divisible_by, tp)
    decoder = read_decoder(hf_config)
    sizes = Sizes(core.num_query_groups, core.kv_channels, vocab, padded, decoder.recurrent, decoder.wide)
    if has_tower is None:
        has_tower = sees_images(config)
    stages = core.virtual_pipeline_model_parallel_size
    # Megatron's schedule reads the number of virtual stages here. Only the model's layers determine it.
    parallel_state.set_virtual_pipeline_model_parallel_world_size(stages)
    parts: list[nn.Module] = [
        HiddenGPTModel(hf_config, core, sizes, virtual, value=value, has_tower=has_tower)
        for virtual in (range(stages) if stages else (None,))
    ]
    if flags.cpu_offloading:
        for part in cast("list[HiddenGPTModel]", parts):
            part.keeping = functools.partial(save_on_cpu, pin_memory=True)
    if config.train.round_weights and not value:
        weights = read_quantized_weights(require_value(config.rollout.hf_checkpoint))
        if weights is not None and weights.scheme == family_for(hf_config).scheme(hf_config):
            round_weights(parts, weights)
    if config.megatron.has_fp8_blocks:
        use_fp8(parts, config, core.num_layers)
    if adapt is not None:
        adapt(parts)
    if ddp:
        freeze(parts, config)
        settings = _ddp_config(config)
        # as in Megatron: the later parts' gradients are complete early enough to be reduced in one piece
        parts = [
            DistributedDataParallel(core, settings, part, disable_bucketing=i > 0)
            for i, part in enumerate(parts)
        ]
    model = built(Parts(parts) if stages else parts[0])
    return model if ddp else model.requires_grad_(False).eval()


def _ddp_config(config: Config) -> DistributedDataParallelConfig:
    fields: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.megatron.use_distributed_optimizer,
        "check_for_nan_in_grad": False,  # the optimizer step checks that the gradient norm is finite
    }
    fields |= config.megatron.core_overrides(DistributedDataParallelConfig)
    return DistributedDataParallelConfig(**fields)


class Parts(nn.ModuleList):
    """The model of a rank with several virtual stages: one part per stage, in the order of their layers."""

    def zero_grad_buffer(self) -> None:
        parts: list[Any] = list(self)  # in their data-parallel wrappers
        for part in parts:
            part.zero_grad_buffer()


def get_parts(model: nn.Module) -> list[nn.Module]:
    """Returns the parts of `Parts`, or the model itself. Megatron and slime's hooks call them the model's chunks."""
    return list(model) if isinstance(model, Parts) else [model]


def unwrap(model: nn.Module) -> HiddenGPTModel:
    """Returns the model inside its data-parallel wrapper, or the model itself. A rank with virtual stages has several
    models."""
    assert not isinstance(model, Parts), "call this for each of get_parts(model)"
    return cast(HiddenGPTModel, model.module if isinstance(model, DistributedDataParallel) else model)


def unwrapped(model: nn.Module) -> list[HiddenGPTModel]:
    """Returns the parts of a rank's model without their wrappers, in the order of their layers."""
    return [unwrap(part) for part in get_parts(model)]


def last_part(model: nn.Module) -> HiddenGPTModel:
    """Returns the part of a rank's model with its last layers. On the last pipeline rank, it has the head."""
    return unwrap(get_parts(model)[-1])


def stage_output(model: nn.Module, tokens: Tensor, layout: PackedLayout) -> Tensor:
    """Maps tokens [P] int64 to the output of this stage's last layer: [P, 1, H] in the model's dtype, or this rank's [P
    / TP, 1, H] with sequence parallelism. Collective over the ranks that share experts.

    Raises ValueError if P does not fit the layout or, with sequence parallelism, the number of tensor-parallel ranks.
    """
    if tokens.shape != layout.positions.shape:
        raise ValueError(
            f"tokens must be [{layout.positions.numel()}] as in the layout, got {list(tokens.shape)}"
        )
    core = unwrap(model).config
    tp = core.tensor_model_parallel_size
    if core.sequence_parallel and tokens.numel() % tp:
        raise ValueError(
            f"packed tokens must be a multiple of --tensor-model-parallel-size {tp} with --sequence-parallel, "
            f"got {tokens.numel()}; pad the row"
        )
    share_longest(layout, core)
    output: Tensor = model(tokens[None], packed_seq_params=layout)
    return output


def gather_hidden(model: nn.Module, output: Tensor) -> Tensor:
    """Maps the last stage's output to hidden states [P, H], equal on all tensor-parallel ranks.

    The backward needs the full gradient, equal on all tensor-parallel ranks, as `rl_kernel.linear_logp` returns it.
    """
    if last_part(model).config.sequence_parallel:
        # every rank has the head's full gradient, so take this rank's rows and do not sum over ranks
        output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
    return output.squeeze(1)


def compute_values(model: nn.Module, hidden: Tensor) -> Tensor:
    """Returns a critic's values [r] fp32 of hidden states [r, H]."""
    values: Tensor = last_part(model).value_head(hidden)
    return values


def compute_logits(model: nn.Module, output: Tensor) -> Tensor:
    """Maps the last stage's output to logits [P, V_local] of Megatron's output layer in the model's dtype, with padding
    columns. The logits are capped if the model has a soft cap."""
    inner = last_part(model)
    tied = inner.share_embeddings_and_output_weights
    weight = inner.shared_embedding_or_output_weight() if tied else None
    logits: Tensor = inner.output_layer(output, weight=weight)[0]
    return capped(logits.squeeze(1), logit_cap(model))


def logit_cap(model: nn.Module) -> float | None:
    """Returns the soft cap of the model's logits, or None."""
    return last_part(model).described.logit_cap


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Returns `cap * tanh(logits / cap)` in the dtype of the logits, as engines compute it. None means no cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def output_weight(model: nn.Module) -> Tensor:
    """Returns the head's weight on this rank, [V_local, H]: the output layer's weight, or the embedding if they are
    tied. Call it only on the last stage."""
    inner = last_part(model)
    weight: Tensor = (
        inner.shared_embedding_or_output_weight()
        if inner.share_embeddings_and_output_weights
        else inner.output_layer.weight
    )
    return weight


def head_main_grad(model: nn.Module) -> Tensor | None:
    """Returns the fp32 buffer [V_local, H] that sums the head's weight gradient over micro-batches. An operator may add
    to it.

    Returns None if the head is frozen, or if the gradient must pass through autograd: --overlap-grad-reduce counts the
    gradients that arrive there.
    """
    weight: Any = output_weight(model)  # the buffer is Megatron's
    wrapper: Any = get_parts(model)[-1]
    settings: DistributedDataParallelConfig = wrapper.ddp_config
    if not weight.requires_grad or settings.overlap_grad_reduce or not settings.grad_reduce_in_fp32:
        return None
    main_grad: Tensor = weight.main_grad
    return main_grad


def vocab_range(model: nn.Module) -> tuple[int, int]:
    """Returns (first vocabulary row of this rank, real vocabulary size), for `vocab_start` and `vocab_size` of
    linear_logp."""
    start = parallel_state.get_tensor_model_parallel_rank() * output_weight(model).shape[0]
    return start, last_part(model).sizes.vocab
