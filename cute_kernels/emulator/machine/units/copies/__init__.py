"""The units that copy between memories."""
