"""Runs launches of any program again: under many schedules, reduced to the fewest steps, and step by step."""
