"""Tools for agents in rollouts: sandboxes, programs that run in sandboxes, and the HTTP dialects of these programs.

Plug-ins of slime import these modules: `slime.agent.sandbox`, `slime.agent.harness`,
`slime.agent.adapters`, `slime.agent.aiohttp_threaded`.
"""
