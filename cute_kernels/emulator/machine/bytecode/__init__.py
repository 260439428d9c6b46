"""Kernels as bytecode, and the warps that run it."""
