"""Kernels for SM90a: WGMMA with the weight resident in registers, TMA multicast, transposed stores."""
