"""The patch embed of uint8 images for SM100a: strips of images are the N operand, the integer weight stays on chip."""
