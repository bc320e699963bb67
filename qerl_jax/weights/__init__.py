"""How checkpoints come in and go out: reading, quantizing and writing models and adapters."""
