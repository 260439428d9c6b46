"""Observations of a launch beside its results: counts, a timeline, races."""
