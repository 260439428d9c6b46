"""PTX text to typed instructions, flow graph and static checks; knows nothing of what executes them."""
