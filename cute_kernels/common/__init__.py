"""Helpers that every room may import and that import no room.

`chips` has the limits of every chip. The others handle files, optional dependencies (`extras`), interrupts, forked
processes, campaigns in worker processes (`executors`), the floating-point environment, and timelines as JSON.
"""
