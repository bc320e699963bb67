"""How completions are scored: rewards as functions, as lists, as coroutines and as URLs."""
