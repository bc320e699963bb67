"""Where problems come from, and how they are split, mixed, ordered and rendered."""
