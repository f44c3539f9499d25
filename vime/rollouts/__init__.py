"""`vime rollout`: a rollout host, which generates for the trainer of another process (slime.rollout.straw)."""
