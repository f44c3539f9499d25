"""Latent attention: the module of the attention slot and its parts."""
