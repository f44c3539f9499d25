"""Records details of a run that a flag turns on: spans of samples for OpenTelemetry, and the memory of trainer
ranks."""
