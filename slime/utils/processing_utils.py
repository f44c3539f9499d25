"""Import path of slime plug-ins: see slime.data.tokenizer."""

from slime.data.tokenizer import load_tokenizer

__all__ = ["load_tokenizer"]
