"""SGLang as a rollout backend: its flags, client, servers and router. What all engines share is in vime.pool."""
