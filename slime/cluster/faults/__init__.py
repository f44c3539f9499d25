"""Detects lost processes of the trainer and finds devices for new ones."""
