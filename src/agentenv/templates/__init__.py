"""Templates: how the root file system of one is made, and how it becomes a running machine's snapshot."""
