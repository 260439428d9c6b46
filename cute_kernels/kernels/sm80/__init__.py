"""Kernels by ``mma.sync``, for any GPU since Ampere."""
