"""Attention of packed buffers: completions that share a prompt, forward and backward."""
