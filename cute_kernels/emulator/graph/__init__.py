"""What a basic block computes, as a graph of values."""
