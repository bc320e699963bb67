"""Measurements: each command writes results/*.json, or a page or picture from them."""
