"""Data that sessions of agents add to samples: the end of a session, and rewards of turns."""
