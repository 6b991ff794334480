"""The composition root of a node: wires the packages together, starts and adopts the daemons, serves, cleans up.

The only place that imports every other server package. Nothing imports it but `cli`.
"""
