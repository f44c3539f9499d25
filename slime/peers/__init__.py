"""Who serves an address: what a server must show before it gets the run's key."""
