"""Tokenizer loading under the path that slime plug-ins use."""

from slime.data.tokenizer import load_tokenizer

__all__ = ["load_tokenizer"]
