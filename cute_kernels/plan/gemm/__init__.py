"""Plans of the dense GEMM: what a legal launch is on each architecture, and which one a problem gets."""
