"""The interface for upstream vime: its flag --selected-logprob-provider takes `linear_logp.provider`."""
