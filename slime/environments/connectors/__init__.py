"""One file per hub, each with a class `Connector` as in `slime.environments.protocol`.

The files run in the Python of the hub's package, which may have no vime. They import the standard library and the
package of the hub only.
"""
