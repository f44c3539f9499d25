"""`vime soak`: a real run of the user's flags under seeded faults, with the proof of its ledger at the end."""
