"""How a run trains: from a config, one step after the other."""
