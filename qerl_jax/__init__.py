"""QeRL in JAX: reinforcement learning of large language models on a policy in 4 bits."""
