"""GPU kernels in CuTe DSL: declared warp roles and pipeline edges, and one folder per architecture."""
