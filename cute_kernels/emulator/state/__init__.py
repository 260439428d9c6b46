"""What a launch has: memories, warps, work that is under way."""
