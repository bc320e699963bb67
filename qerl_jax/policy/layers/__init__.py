"""The kinds of layers and of MLPs, a module each, and `kinds`, which says what each layer has."""
