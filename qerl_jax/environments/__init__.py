"""What a policy talks to during a rollout: tools and games, in processes of their own."""
