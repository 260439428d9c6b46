"""Kernels for SM100a: tcgen05 tensor cores, tensor memory, CTA pairs."""
