"""`vime import`: turns a training script of TRL or a configuration of verl into a file of vime's flags.

The user's code is read and not run. Each setting is a line of the file, with a comment about its meaning here.
"""
