"""A program of a model and the statements that test it, in two sandboxes: neither process can reach the other.

`answer` runs the program and calls its functions when it is asked. `tester` runs the statements; a name of the
program is a stand-in there, whose calls go to the program (`peer`). Plain values cross as JSON (`wire`), and the
tester compares them. The files are copied into the sandboxes. So they import the standard library only, and each other
relatively.
"""
