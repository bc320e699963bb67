"""How fast rollouts are."""
