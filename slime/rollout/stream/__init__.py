"""This package generates groups without pause and cuts them into batches, see stream.py."""
