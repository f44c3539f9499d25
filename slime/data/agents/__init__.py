"""What sessions of agents add to samples: how they ended, and rewards of turns."""
