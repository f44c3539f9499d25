"""Predicts the resources of a cluster that a run would start on this host."""

from __future__ import annotations

from ray._private.resource_and_label_spec import ResourceAndLabelSpec


def host_resources() -> dict[str, float]:
    """Returns CPUs and GPUs of this host as Ray counts them, within the limits of a container and
    CUDA_VISIBLE_DEVICES."""
    spec = ResourceAndLabelSpec()
    spec.resolve(is_head=True)
    return {"CPU": float(spec.num_cpus or 0), "GPU": float(spec.num_gpus or 0)}
