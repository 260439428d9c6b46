"""Parts of the SM90a kernels that compute ``out^T = weight * x^T``: features are the rows of a WGMMA."""
