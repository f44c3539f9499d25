"""`vime replay`: computes recorded steps of a run again, and checks receipts."""
