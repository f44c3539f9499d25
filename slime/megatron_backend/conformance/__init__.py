"""Computes a model in the trainer and in transformers, so that tests can compare both."""
