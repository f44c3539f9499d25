"""Lists the subcommands of `vime`: names, descriptions and modules. The folder has the small commands.

`vime --help` and shells import this file, so it imports nothing.
"""

COMMANDS = {
    "train": "run a training job from the flags of a launch script",
    "rollout": "a rollout host: generate for a run with --rollout-data-transport straw, with engines of this host",
    "plan": "check the same flags and show what they mean; starts nothing",
    "rehearse": "SCRIPT or flags: run a launch with a tiny model on this CPU, and list what would fail",
    "engines": "list|add|remove RUN_DIR: show the engines of a run, and change them while it runs",
    "serve": "engine|router HOST:PORT: start an engine or a router that a run uses by its address",
    "service": "serve the Tinker protocol: several users train and sample own adapters over one base",
    "config": "print the flags of --config files as YAML or as a shell array",
    "doctor": "check whether this machine has what a run needs; --json",
    "checkpoint": "verify DIR: compare the files of checkpoints with their checksums",
    "import": "[trl|verl] FILE: turn a script of TRL or a configuration of verl into flags of vime",
    "new": "reward|agent|project DIR: write the first files, with a test that passes",
    "export": "write a checkpoint as a Hugging Face directory",
    "soak": "run the flags of train under faults, such as killed processes, and prove that no group was lost",
    "audit": "where trainer and engine differ in a saved rollout of RUN_DIR",
    "replay": "RUN --step N: compute a recorded step again, bit for bit; RUN --verify: check its receipt",
    "watch": "RUN_DIR: a run in the terminal: curves, engines, slow samples, warnings",
    "trace": "RUN_DIR: a timeline of all processes of a run, for https://ui.perfetto.dev",
    "compare": "RUN RUN: how configuration, versions and curves of runs differ",
    "plot": "draw the curves of run directories",
    "ui": "curves, timeline, samples and settings of RUN_DIR ... in a browser; --export FILE.html",
    "bench": "what rl_kernel changes: op, module and e2e measure it, report prints it",
    "models": "list the model families and what was run of each",
    "flags": "list or search the flags: vime flags WORD; --json has every accepted flag with its owner",
    "explain": "what an error message means: vime explain WORDS",
    "completion": "a script that completes commands and flags in bash or zsh",
}

WORK = {
    "train",
    "engines",
    "serve",
    "import",
    "new",
    "export",
    "audit",
    "replay",
    "trace",
    "plot",
    "rehearse",
    "rollout",
    "service",
    "ui",
    "bench",
    "soak",
}
"""Subcommands that do more than print."""

MODULES = {
    "audit": "vime.audit.command",
    "compare": "vime.view.compare",
    "doctor": "vime.doctor.command",
    "engines": "vime.members.command",
    "explain": "vime.explain.command",
    "import": "vime.importing.command",
    "new": "vime.new.command",
    "plan": "vime.plan.command",
    "replay": "vime.replay.command",
    "rehearse": "vime.rehearse.command",
    "rollout": "vime.rollouts.command",
    "plot": "vime.view.plot",
    "service": "vime.service.command",
    "soak": "vime.soak.command",
    "trace": "vime.view.trace",
    "train": "vime.driver",
    "ui": "vime.view.page.command",
    "watch": "vime.view.watch",
}
"""Maps a subcommand to its module, if that is not vime.commands.NAME."""
