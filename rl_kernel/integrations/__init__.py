"""How other programs load these operators, each by an interface of its own. Nothing here imports such a program."""
