"""State of a launch: memories, warps, work that is under way."""
