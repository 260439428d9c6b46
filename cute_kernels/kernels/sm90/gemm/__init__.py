"""The dense GEMM for SM90a: WGMMA from shared memory, cooperative or pingpong, with a split of K."""
