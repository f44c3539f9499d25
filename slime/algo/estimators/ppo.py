"""PPO (1707.06347): known by name, and an error until there is a critic (see `slime.algo.returns.gae`)."""

from slime.algo.estimators.record import CLIPPED, Estimator

PPO = Estimator("ppo", "an error: a critic is not supported", CLIPPED, None, needs_values=True)
