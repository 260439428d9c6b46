"""The command line: one module per command, and the figures and tables that they print."""
