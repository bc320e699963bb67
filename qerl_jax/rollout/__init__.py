"""How the policy samples."""
