"""What a config may say: its rewards, the fields that a mode reads, and a config as text."""
