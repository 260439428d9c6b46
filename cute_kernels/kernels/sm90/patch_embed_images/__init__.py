"""The patch embed of uint8 images for SM90a: strips of images are the operand, integer weights stay in registers."""
