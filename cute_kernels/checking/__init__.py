"""Runs launches of any program under many schedules, and reduces a schedule that fails."""
