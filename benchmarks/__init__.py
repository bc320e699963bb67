"""Measurements: each command writes a JSON file under results/, or a page or picture from them."""
