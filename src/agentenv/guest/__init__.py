"""The guest: its kernel and initramfs, and the node's calls to its daemon. Imports `model` and `errors` only."""
