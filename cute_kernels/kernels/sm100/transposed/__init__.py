"""Parts of the SM100a kernels that compute ``out^T = weight * x^T``: features are the lanes of tensor memory."""
