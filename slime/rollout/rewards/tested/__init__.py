"""This package runs a model's program and the statements that test the program in two separate sandboxes.

`answer` runs the program and calls its functions on request. `tester` runs the statements; there, a proxy replaces each
object of the program, and forwards calls to the program (`peer`). Plain values are sent as JSON (`wire`), and the
tester compares them. The files are copied into the sandboxes, so they import only the standard library, and each other
relatively.
"""
