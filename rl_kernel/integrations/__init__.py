"""Interfaces through which other programs load these operators, one package per program. No module here imports such a
program."""
