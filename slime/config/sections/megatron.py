"""Defines the Megatron section: parallel sizes, precision, optimizer, schedule, and other Megatron flags.

The fields made by `flag` need no import of Megatron. Every other Megatron flag (megatron_flags.py) goes into
`overrides`, under the name of its megatron-core field. MODEL_ARGS of launch scripts go into `model_args`. They set
nothing and are compared with the checkpoint's config.json.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from dataclasses import dataclass, field

from slime.config.fields import Values, flag
from slime.config.ranges import BOUND, COUNT, COUNT_OR_ZERO, DECAY, RATE, SMALL, UNIT

_OWN_FP8 = (
    *("fp8", "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
    "num_layers_at_end_in_bf16",
)
"""Core fields that the trainer's own fp8 layers read instead of megatron-core."""


@dataclass(frozen=True)
class MegatronConfig:
    """The flags of Megatron that this project reads by name, and all others."""

    tensor_model_parallel_size: int = flag(1, "number of GPUs that share each layer", range=COUNT)
    pipeline_model_parallel_size: int = flag(
        1, "number of pipeline stages: each holds a part of the layers", range=COUNT
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "the layers of each stage: E embedding, t layer, L loss, | between stages, as in `Ett|ttt|ttL`; `t*3` and "
        "`(tt|)*2` repeat; more stages than ranks are virtual stages",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "number of layers of the first pipeline rank", range=COUNT_OR_ZERO
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "number of layers of the last pipeline rank", range=COUNT_OR_ZERO
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as a layer when layers are divided among pipeline ranks"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the loss as a layer when layers are divided among pipeline ranks"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "number of virtual stages of each pipeline rank: the pipeline is interleaved", range=COUNT
    )
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "the same as --num-virtual-stages-per-pipeline-rank", range=COUNT
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "number of layers of each virtual stage, in place of the number of virtual stages", range=COUNT
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        "number of micro-batches that run one after the other in a virtual stage (default: the number of pipeline "
        "ranks); the micro-batches of a step are a multiple of it",
        range=COUNT,
    )
    context_parallel_size: int = flag(1, "number of GPUs that share each sequence", range=COUNT)
    cp_comm_type: str | None = flag(
        None,
        "how the context parallel GPUs compute attention: a2a exchanges heads, so that memory falls with the number of "
        "GPUs; all_gather gathers all keys and values on each GPU (default: a2a if the heads can be divided)",
        choices=("a2a", "all_gather", "p2p", "a2a+p2p"),
    )
    expert_model_parallel_size: int = flag(1, "number of GPUs that share the experts of a layer", range=COUNT)
    expert_tensor_parallel_size: int | None = flag(None, "number of GPUs that share each expert", range=COUNT)
    sequence_parallel: bool = flag(
        False, "split activations over the tensor parallel ranks between their regions"
    )
    bf16: bool = flag(False, "bfloat16 parameters (the default on a GPU)")
    fp16: bool = flag(False, "float16 parameters")
    fp32: bool = flag(False, "float32 parameters (the default on a CPU)")
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this number times the tensor parallel size", range=COUNT
    )
    force_fp8_ue8m0_scale: bool = flag(
        False, "the scales of --fp8-recipe blockwise are powers of two (ue8m0), as on Blackwell GPUs"
    )
    optimizer: str = flag(
        "adam",
        "optimizer; muon updates matrices with Muon and the other weights with AdamW, and its state is whole on each "
        "data-parallel rank",
        choices=("adam", "muon", "dist_muon"),
    )
    padded_vocab_size: int | None = flag(
        None, "rows of the vocabulary with padding, in place of --make-vocab-size-divisible-by", range=COUNT
    )
    use_distributed_optimizer: bool = flag(True, "divide the optimizer's state among the data parallel ranks")
    optimizer_cpu_offload: bool = flag(
        False, "keep Adam's main weights and moments on the host and update the weights there"
    )
    optimizer_offload_fraction: float = flag(
        1.0, "part of the weights for which --optimizer-cpu-offload does so", range=UNIT
    )
    use_precision_aware_optimizer: bool = flag(
        False,
        "store float32 main weights on the device as the 16 bits that their bfloat16 weights do not have",
    )
    stream_optimizer_state_to_disk: bool = flag(
        False,
        "keep Adam's main weights and moments in files in --offload-train-disk-dir, and update the weights on the host",
    )
    offload_train_disk_dir: str | None = flag(
        None, "folder of a local disk of each trainer host, for --stream-optimizer-state-to-disk"
    )
    offload_train_disk_chunk_mb: int = flag(
        64,
        "MiB of float32 gradients whose weights are updated together, with their state in one file",
        range=COUNT,
    )
    stream_optimizer_state_moment_dtype: str = flag(
        "fp32",
        "dtype of Adam's moments in the files; with bf16, a weight has 8 bytes there in place of 12, and Adam computes "
        "in float32",
        choices=("fp32", "bf16"),
    )
    reset_optimizer_states: bool = flag(
        False, "set the optimizer's moments and step counts to zero before each rollout is trained on"
    )
    cpu_offloading: bool = flag(
        False,
        "keep the input of each layer in host memory from the forward to the backward, with full recomputation; for "
        "long sequences",
    )
    lr: float = flag(1e-6, "learning rate", range=RATE)
    min_lr: float = flag(0.0, "lowest learning rate of the schedule", range=RATE)
    lr_decay_style: str = flag(
        "constant",
        "schedule of the learning rate after the warm-up; WSD is constant until its last --lr-wsd-decay-iters steps",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "how the rate of --lr-decay-style WSD falls at the end",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "number of last optimizer steps of --lr-decay-style WSD, in which the rate falls", range=COUNT
    )
    lr_warmup_iters: int = flag(0, "number of optimizer steps of linear warm-up", range=COUNT_OR_ZERO)
    lr_warmup_fraction: float | None = flag(
        None, "part of the schedule's steps that are warm-up, in place of --lr-warmup-iters", range=DECAY
    )
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up", range=RATE)
    lr_decay_iters: int | None = flag(
        None, "number of optimizer steps until --min-lr (default: all steps of the run)", range=COUNT
    )
    weight_decay: float = flag(0.01, "decoupled weight decay", range=RATE)
    start_weight_decay: float | None = flag(
        None, "weight decay at the start of the schedule (default: --weight-decay)", range=RATE
    )
    end_weight_decay: float | None = flag(
        None, "weight decay at the end of the schedule (default: --weight-decay)", range=RATE
    )
    weight_decay_incr_style: str = flag(
        "constant",
        "how the weight decay goes from --start-weight-decay to --end-weight-decay",
        choices=("constant", "linear", "cosine"),
    )
    adam_beta1: float = flag(0.9, "Adam beta1", range=DECAY)
    adam_beta2: float = flag(0.999, "Adam beta2", range=DECAY)
    adam_eps: float = flag(1e-8, "Adam epsilon", range=SMALL)
    clip_grad: float = flag(1.0, "maximum gradient norm; 0 switches clipping off", range=BOUND)
    params_dtype: str = "bfloat16"
    """Name of a torch dtype. --bf16, --fp16, --fp32 and the device decide it."""
    overrides: Values = field(default_factory=dict)
    """Other settings, by the names of their megatron-core fields."""
    model_args: Values = field(default_factory=dict)
    """MODEL_ARGS of launch scripts."""

    @property
    def expert_tensor_parallel(self) -> int:
        """Returns the number of ranks that split one expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def has_expert_layout(self) -> bool:
        """Returns True if experts are distributed over ranks differently from the other weights. megatron-core then
        sums their gradients over other ranks, and builds a separate optimizer for them."""
        return (
            self.expert_model_parallel_size > 1
            or self.expert_tensor_parallel != self.tensor_model_parallel_size
        )

    @property
    def stores_remainders(self) -> bool:
        """Returns True if main weights on the device are remainders of 16 bits (--use-precision-aware-optimizer)."""
        return self.use_precision_aware_optimizer and self.remainders_obstacle is None

    @property
    def remainders_obstacle(self) -> str | None:
        """Returns the flag that prevents remainders, or None."""
        obstacles = {
            "--optimizer-cpu-offload": self.optimizer_cpu_offload and self.optimizer_offload_fraction == 1,
            f"--optimizer {self.optimizer}": self.optimizer != "adam",
            "--no-use-distributed-optimizer": not self.use_distributed_optimizer,
            f"--params-dtype {self.params_dtype}": self.params_dtype != "bfloat16",
            "--no-store-param-remainders": self.overrides.get("store_param_remainders") is False,
        }
        return next((flag for flag, present in obstacles.items() if present), None)

    @property
    def may_expand_segments(self) -> bool:
        """Returns False if megatron-core does not support expandable segments of PyTorch's allocator: with buffers that
        NCCL registers, and with CUDA graphs."""
        names = ("nccl_ub", "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
        return all(self.overrides.get(name) in (None, False, "none") for name in names)

    @property
    def has_fp8_blocks(self) -> bool:
        """Returns True if the linear layers compute in fp8 with scales per block."""
        return self.overrides.get("fp8_recipe") == "blockwise" and bool(self.overrides.get("fp8"))

    def computes_in_fp8(self, layer: int, count: int) -> bool:
        """Returns True if layer `layer` of `count` computes in fp8."""
        if not self.has_fp8_blocks:
            return False
        if not self.overrides.get("first_last_layers_bf16"):
            return True
        first, last = (int(self.overrides.get(f"num_layers_at_{end}_in_bf16", 1)) for end in ("start", "end"))
        return first <= layer < count - last

    def core_overrides(self, config_class: type) -> Values:
        """Returns the `overrides` that are fields of `config_class` (a megatron-core dataclass), in the types of that
        class.

        `overrides` holds enums and torch dtypes as names, so that a saved configuration is plain JSON.
        """
        hints = typing.get_type_hints(config_class)
        names = {f.name for f in dataclasses.fields(config_class)}
        names -= set(_OWN_FP8) if self.has_fp8_blocks else set()
        return {k: _core_value(hints[k], v) for k, v in self.overrides.items() if k in names}


def _core_value(hint: object, value: object) -> object:
    if not isinstance(value, str):
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint[value]
    if "torch.dtype" in str(hint):
        import torch

        return getattr(torch, value)
    return value
