"""Measures other libraries on this card, each beside a step of this project."""
