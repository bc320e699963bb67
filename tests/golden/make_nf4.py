"""Writes nf4.npz: the bytes and the values of bitsandbytes' NF4 without double quantization.

For each NAME below, `NAME.source` is a weight [N, K] as the bits of bfloat16. `NAME.packed` uint8
[N K/2] and `NAME.absmax` float32 [N K/64] are the results of `quantize_4bit` on a CPU, and
`NAME.float32` and `NAME.bfloat16` (as bits) are the results of `dequantize_4bit`:

    weights   random numbers of several sizes; blocks of zeros, negative zeros and subnormal numbers
    ratios    every significand over every significand, at the exponents that reach a decision
              bound, with both signs: all possible ratios of a bfloat16 weight to the largest of its
              block (without values, which would be large)

Needs Python 3.11, torch==2.13.0 (CPU), bitsandbytes==0.50.2, numpy:

    python tests/golden/make_nf4.py
"""

import pathlib

import bitsandbytes.functional as bnb
import numpy as np
import torch

BLOCK = 64


def weights():
    """Returns bfloat16 weights [24, 192]."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 192, generator=generator)
    weight *= torch.logspace(-6, 4, 24)[:, None]
    weight[0, :64] = 0
    weight[1, 64:128] = -0.0
    weight[2] *= 1e-34  # subnormal: below 1.2e-38
    weight[3, 7] = 60
    return weight.to(torch.bfloat16)


def ratios():
    """Returns bfloat16 [128, 29 BLOCK]; each block of row m has the largest weight 1 + m / 128."""
    largest = 1 + torch.arange(128) / 128
    # The decision bounds around zero are -0.046 and 0.040: codes do not change below 2^-5.
    scales = 2.0 ** -torch.arange(7)
    values = (largest[None] * scales[:, None]).reshape(-1)
    values = torch.cat([values, -values])
    row = torch.zeros(-(-len(values) // (BLOCK - 1)) * (BLOCK - 1))
    row[: len(values)] = values
    weight = row.reshape(1, -1, BLOCK - 1).repeat(128, 1, 1)
    peaks = largest[:, None, None]
    # Ratios above 1 cannot occur in the block.
    weight = torch.where(weight.abs() <= peaks, weight, 0)
    weight = torch.cat([weight, peaks.expand(-1, weight.shape[1], 1)], dim=-1)
    return weight.reshape(128, -1).to(torch.bfloat16)


def bits(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


def main():
    arrays = {}
    for name, weight in {"weights": weights(), "ratios": ratios()}.items():
        packed, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        assert not state.nested
        arrays[f"{name}.source"] = bits(weight)
        arrays[f"{name}.packed"] = packed.flatten().numpy()
        arrays[f"{name}.absmax"] = state.absmax.numpy()
    packed, state = bnb.quantize_4bit(weights(), blocksize=BLOCK, quant_type="nf4")
    arrays["weights.bfloat16"] = bits(bnb.dequantize_4bit(packed, state))
    state.dtype = torch.float32
    arrays["weights.float32"] = bnb.dequantize_4bit(packed, state).numpy()
    path = pathlib.Path(__file__).parent / "nf4.npz"
    np.savez_compressed(path, **arrays)
    print({name: array.shape for name, array in arrays.items()}, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
