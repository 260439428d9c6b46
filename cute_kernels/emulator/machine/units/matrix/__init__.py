"""The units that multiply matrices."""
