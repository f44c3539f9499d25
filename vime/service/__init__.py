"""`vime service`: training as a service. Clients of the Tinker protocol train and sample adapters over one base."""
