"""The command line: one module for each command, which declares its options and calls the room that does the work."""
