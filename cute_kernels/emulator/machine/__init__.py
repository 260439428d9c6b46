"""The machine that executes PTX: launches, scheduler, units, state."""
