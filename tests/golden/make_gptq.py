"""Writes gptq.npz: weights that llm-compressor quantizes to NVFP4 by GPTQ.

For each case the file has `weight` [N, K] and `hessian` [K, K] in float32 (the upper triangle by
rows), and by compressed-tensors for float32 weights `scales` (bytes of FP8, [N, K/16]) and
`divisor`. `codes` [N, K] are the E2M1 codes of llm-compressor's `quantize_weight`, and
`ordered_codes` those with columns by descending energy (`actorder="static"`).

    many    correlated inputs, two panels of columns
    few     fewer tokens than columns, dead columns, a channel of outliers, blocks of zeros, ties

Needs Python 3.12, torch==2.14.0 (CPU), llmcompressor==0.14.0.1, compressed-tensors==0.19.0:

    python tests/golden/make_gptq.py
"""

import pathlib

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

HERE = pathlib.Path(__file__).parent
DAMPING = 0.01


def arguments(order):
    return QuantizationArgs(
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
        actorder=order,
    )


def cases():
    rng = np.random.default_rng(0)

    def inputs(tokens, columns):
        mixed = rng.standard_normal((tokens, columns // 4)) @ rng.standard_normal(
            (columns // 4, columns)
        )
        return mixed + 0.5 * rng.standard_normal((tokens, columns))

    yield "many", rng.standard_normal((24, 256)), inputs(1000, 256)
    weight, x = rng.standard_normal((24, 96)), inputs(40, 96)
    weight[0, :16] = 0
    weight[1] = 0
    weight[2, 16:32] *= 1e-6
    weight[3, 32:48] = np.arange(-8, 8) / 8
    x[:, [3, 17, 40]] = 0
    x[:, 20] *= 100
    yield "few", weight, x


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    arrays = {}
    for name, weight, x in cases():
        weight = torch.tensor(weight, dtype=torch.bfloat16).float()
        x = torch.tensor(x, dtype=torch.float64)
        hessian = (2 / len(x) * x.T @ x).float()
        plain = arguments(None)
        divisor = generate_gparam(weight.min(), weight.max())
        blocks = weight.reshape(len(weight), -1, 16)
        scales, zeros = calculate_qparams(
            blocks.amin(dim=-1), blocks.amax(dim=-1), plain, global_scale=divisor
        )
        saved = {
            "weight": weight,
            "hessian": hessian[tuple(torch.triu_indices(*hessian.shape))],
            "scales": scales.to(torch.float8_e4m3fn).view(torch.uint8),
            "divisor": divisor.reshape(()),
        }
        for key, order in (("codes", None), ("ordered_codes", "static")):
            values, _, used_rounding = quantize_weight(
                weights=weight[None].clone(),
                hessians=hessian[None].clone(),
                scale=scales[None].float(),
                zero_point=zeros[None],
                global_scale=divisor.reshape(1),
                quant_args=arguments(order),
                blocksize=128,
                percdamp=DAMPING,
            )
            assert not used_rounding.any()
            steps = (scales.float() / divisor).repeat_interleave(16, dim=1)
            numbers = values[0] / steps
            nearest = torch.round(2 * numbers) / 2
            assert (numbers - nearest).abs().max() < 1e-5
            packed = pack_fp4_to_uint8(nearest)
            saved[key] = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(weight.shape)
        arrays |= {f"{name}_{key}": value.numpy() for key, value in saved.items()}
    np.savez_compressed(HERE / "gptq.npz", **arrays)


if __name__ == "__main__":
    main()
