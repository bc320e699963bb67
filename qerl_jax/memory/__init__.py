"""The memory of a run, planned by arithmetic."""
