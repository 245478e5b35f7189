"""The plan file."""
