"""`vime plan --search`: the layouts of a number of GPUs, with their memory and the predicted time of a step."""
