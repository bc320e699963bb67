"""Attention of packed buffers: groups of completions with a shared prompt, forward and backward."""

from pallas_kernels.attention.packed import Segments, attend_packed, segments

__all__ = ["Segments", "attend_packed", "segments"]
