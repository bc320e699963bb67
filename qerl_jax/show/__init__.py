"""How a run looks: curves and completions on a terminal, or in a page for a browser."""
