"""Files that appear whole, paths, threads, signals, the hub, the terminal."""
