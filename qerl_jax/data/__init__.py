"""Where problems come from, and how they are split, mixed and ordered."""
