"""Programs that are compiled before the first step, and their cache."""
