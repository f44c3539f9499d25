"""Every symbol of torch that this project replaces, in trainers on machines without a GPU."""

from __future__ import annotations

from slime.bridges import Patch

_HERE = "slime.megatron_backend.cpu_device"
_CUDA = "megatron-core needs a CUDA device even on hosts without one; the CPU replaces it"
_GLOO = "NCCL takes tensors of different sizes, and gloo does not"
_REPLACED = {
    _CUDA: {
        "torch.cuda:current_device": "cpu",
        "torch.cuda:set_device": "nothing",
        "torch.cuda:synchronize": "nothing",
        "torch.cuda:empty_cache": "nothing",
        "torch.cuda:ipc_collect": "nothing",
        "torch.cuda:reset_peak_memory_stats": "nothing",
        "torch.cuda:memory_allocated": "zero",
        "torch.cuda:max_memory_allocated": "zero",
        "torch.cuda:memory_reserved": "zero",
        "torch.cuda:max_memory_reserved": "zero",
        "torch.cuda:Stream": "in_order",
        "torch.cuda:Event": "in_order",
        "torch.cuda:stream": "in_order",
        "torch.cuda:current_stream": "only_stream",
        "torch.cuda:default_stream": "only_stream",
        # With `is_initialized`, torch runs its deferred CUDA calls at once. Otherwise it would queue them forever.
        "torch.cuda:is_initialized": "true",
        # Megatron's RNG tracker saves, seeds and restores the generator of its device: here the CPU's generator.
        "torch.cuda:default_generators": "cpu_generators",
        "torch.cuda:get_rng_state": "cpu_rng_state",
        "torch.cuda:set_rng_state": "set_cpu_rng_state",
        "torch.cuda:manual_seed": "cpu_seed",
        "torch.cuda.random:get_rng_state": "cpu_rng_state",
        "torch.cuda.random:set_rng_state": "set_cpu_rng_state",
        "torch.cuda.random:manual_seed": "cpu_seed",
    },
    _GLOO: {
        "torch.distributed:all_gather": "gathers_any_size",
        "torch.distributed:reduce_scatter": "scatters_any_size",
    },
    "Megatron passes split sizes as tensors, which it converts to numbers only on a GPU": {
        "torch.distributed:all_to_all_single": "with_numbers",
    },
}
PATCHES = tuple(
    Patch(
        symbol=symbol,
        replacement=f"{_HERE}:{name}",
        condition="in a trainer on a machine without a GPU",
        why=why,
        removed_when="megatron-core runs on a CPU",
    )
    for why, symbols in _REPLACED.items()
    for symbol, name in symbols.items()
)
