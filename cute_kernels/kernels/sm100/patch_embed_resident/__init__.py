"""The patch embed of rows for SM100a whose weight stays on chip: rows are the N operand, the output is transposed."""
