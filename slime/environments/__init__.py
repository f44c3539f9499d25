"""Environments of other projects: their prompts, their loop and their rubric, with the run's model.

A hub is a project that has environments. `hubs` is the table of the hubs, and `connectors` has one file per hub. A
connector runs in a separate process (`process`), because the packages of hubs need other versions than the engine.
`rows` makes a prompt file of an environment's prompts, and `slime.sessions.environments` runs the episodes.
"""
