"""How a run trains: `step.py` is the method, `loop.py` is the life of a run."""
