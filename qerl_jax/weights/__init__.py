"""How checkpoints come in and go out: reading and writing models and adapters."""
