"""The vision tower of a model: transformers' modules ahead of Megatron's decoder."""
