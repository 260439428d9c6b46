"""Observations of a launch beside its results: counters of the units, a timeline of the warps."""
