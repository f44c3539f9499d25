"""SGLang as a rollout backend: its flags, client, servers and router. vime.pool has the shared parts of all engines."""
