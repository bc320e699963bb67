"""How good a policy is: accuracy on problems, perplexity, a single answer."""
