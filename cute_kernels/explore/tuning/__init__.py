"""Which configuration is fastest on the GPU at hand: timed, and remembered by problem and device."""
