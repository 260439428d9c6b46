"""Machine code of kernels: what of it costs, in which loop, and which line of PTX and source it was made of."""
