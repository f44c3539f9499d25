"""What an agent of a rollout needs besides the model: sandboxes, programs that run in them, the dialects they speak.

The names are those that plug-ins of slime import: `slime.agent.sandbox`, `slime.agent.harness`,
`slime.agent.adapters`, `slime.agent.aiohttp_threaded`.
"""
