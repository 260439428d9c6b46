"""Runs launches of any program again: under many schedules, reduced to the fewest steps, step by step in a debugger.

`mutation/` drops or weakens one synchronising instruction at a time and reports the mutants that nothing notices.
"""
