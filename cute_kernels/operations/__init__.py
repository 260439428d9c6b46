"""The operations that users call: arguments, checks, operands, dispatch; one module per operation."""
