"""Looking at kernels and choosing their configurations: sweeps, notebooks, profiles, machine code, tuning."""
