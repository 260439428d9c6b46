"""Units that execute: those of a multiprocessor, CTAs and clusters."""
