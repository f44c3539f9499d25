"""Trains several adapters over one base: training as a service. Each adapter has one owner, a tenant.

The base is loaded once. An adapter has its own matrices, gradients and state of Adam, which stay on the device. Tenants
train in turns, with the micro-batches that they would have alone, so that a tenant's results do not depend on others.
"""

from slime.megatron_backend.tenants.build import build_trainer

__all__ = ["build_trainer"]
