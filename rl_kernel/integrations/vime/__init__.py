"""Upstream vime: `linear_logp.provider` is for its flag --selected-logprob-provider."""
