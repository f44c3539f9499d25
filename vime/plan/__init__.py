"""`vime plan`: checks the flags of a run, and shows its layout, memory and times without starting it."""
