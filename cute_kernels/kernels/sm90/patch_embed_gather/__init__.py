"""The patch embed of 16-bit images for SM90a: TMA gathers patches, both operands come from shared memory."""
