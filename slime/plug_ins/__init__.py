"""Functions that only plug-ins and Python launch scripts call. `slime.utils` exports them under slime's names."""
