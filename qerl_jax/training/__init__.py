"""How a run begins (`begin.py`), takes steps (`step.py`) and lives (`loop.py`)."""
