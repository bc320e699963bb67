"""Writes mxfp4.npz: torchao's MXFP4, and the scales that compressed-tensors chooses instead.

`source` is a weight [N, K] as the bits of bfloat16: random numbers of several sizes, a block of
zeros, and three rows that hold every significand at every exponent that does not become zero under
a block's scale, and every significand as the largest of a block. torchao's `to_mx` with the floor
rule follows the text of OCP Microscaling v1.0 (section 6.3) and gives `packed` uint8 [N, K/2],
`scales` uint8 [N, K/32], the bits of E8M0, and `values` float32 [N, K], the dequantized weight.
`compressed_tensors` [N, K/32] holds the scales of compressed-tensors' `generate_mx_scales`.

torchao divides by 2^-126 where it stores the scale 2^-127; the source is larger than that. torchao
keeps the sign of a negative zero; the source has no negative zero.

Needs Python 3.11, torch==2.13.0 (CPU), torchao==0.18.0, compressed-tensors==0.19.0, numpy:

    python tests/golden/make_mxfp4.py
"""

import pathlib

import numpy as np
import torch
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

BLOCK = 32


def weights():
    """Returns bfloat16 weights [27, 50 BLOCK]."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(24, 50 * BLOCK, generator=generator) * torch.logspace(-30, 30, 24)[:, None]
    drawn[0, :BLOCK] = 0
    significands = 1 + torch.arange(128) / 128
    # The scale is a quarter of the largest power of two. A sixteenth of that power is a quarter of
    # the scale, and smaller numbers become zero.
    values = (significands * 2.0 ** -torch.arange(6)[:, None]).reshape(-1)
    values = torch.cat([values, -values, torch.zeros(50 * (BLOCK - 1) - 2 * len(values))])
    peaks = significands.repeat(2)[: 3 * 50].reshape(3, 50, 1)
    listed = torch.cat([values.reshape(50, BLOCK - 1).expand(3, -1, -1), peaks], dim=-1)
    listed = listed.reshape(3, -1) * torch.tensor([2.0**-60, 1.0, 2.0**60])[:, None]
    weight = torch.cat([drawn, listed]).to(torch.bfloat16)
    return torch.where(weight == 0, 0, weight)


def main():
    weight = weights()
    scales, packed = to_mx(weight, torch.float4_e2m1fn_x2, BLOCK, ScaleCalculationMode.FLOOR)
    values = to_dtype(packed, scales, torch.float4_e2m1fn_x2, BLOCK, torch.float32)
    amax = weight.reshape(len(weight), -1, BLOCK).abs().amax(dim=-1)
    arrays = {
        "source": weight.view(torch.int16).numpy().view(np.uint16),
        "packed": packed.view(torch.uint8).numpy(),
        "scales": scales.view(torch.uint8).numpy(),
        "values": values.numpy(),
        "compressed_tensors": generate_mx_scales(amax).clamp(0, 254).to(torch.uint8).numpy(),
    }
    path = pathlib.Path(__file__).parent / "mxfp4.npz"
    np.savez_compressed(path, **arrays)
    print({name: array.shape for name, array in arrays.items()}, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
