"""How the policy improves: rewards, advantages, losses, the update."""
