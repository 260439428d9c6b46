"""What the command line does: one module per command, and the figures and tables that they print."""
