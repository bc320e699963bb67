"""How the policy improves: advantages, losses, packed buffers, the update."""
