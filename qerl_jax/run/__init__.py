"""How a run lives: the loop, its folder, its logs and its checkpoints."""
