"""Whole programs of the host, whose launches and "cuda" tensors are the emulator's."""
