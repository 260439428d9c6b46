"""GPU kernels in CuTe DSL: declared warp roles and pipeline edges, one folder for each architecture.

A kernel reads its plan and decides nothing itself. Roles that several kernels share (loads, epilogue, tiles) lie beside
the folders.
"""
