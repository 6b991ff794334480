"""Servers that tests start on loopback, and the faults between them and what is tested."""
