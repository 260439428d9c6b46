"""Damaged programs: whatever the emulator is given, it ends with a result or with an error that names what is wrong."""
