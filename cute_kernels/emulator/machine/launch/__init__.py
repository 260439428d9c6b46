"""One launch: its arguments, its clusters, in which order their warps run, `run()`."""
