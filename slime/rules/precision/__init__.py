"""Rules of runs whose trainer computes in fewer bits than 16."""
