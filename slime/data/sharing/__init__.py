"""Work that samples of a micro-batch share: a prompt that several samples begin with is computed once."""
