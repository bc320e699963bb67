"""What a config may say: every field in one row, the models, recipes and installed experiments."""
