"""The race detector: clocks, shadow memory, and which order each pair of accesses needs."""
