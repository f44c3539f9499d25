"""`vime explain` shows the meaning and the remedy of an error message.

The command reads the messages from the code when it first needs them.
"""
