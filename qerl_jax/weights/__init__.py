"""How checkpoints come and go."""
