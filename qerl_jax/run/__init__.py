"""What lies in a run folder: metrics, checkpoints, pictures; and how a run is stopped."""
