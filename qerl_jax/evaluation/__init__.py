"""How good a policy is: its accuracy on problems, its perplexity, a single answer."""
