"""Basic blocks as graphs of the values that they compute."""
