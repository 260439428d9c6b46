"""What executes: the units of a multiprocessor, CTAs and clusters."""
