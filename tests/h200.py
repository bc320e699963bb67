"""Compiles for an H200 on a machine without one."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.rollout import random_policy
from pallas_kernels.decode.attention import AttentionInputs
from pallas_kernels.fp4_matmul import layout
from qerl_jax.policy.layers.kinds import layers_of
from qerl_jax.policy.quant import QuantTensor

CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
DEVICE = AbstractDevice("NVIDIA H200", 132, "gpu")


@contextlib.contextmanager
def compiler(devices=1, tensor=1, *, config=CONFIG, device=DEVICE):
    """Yields a function that compiles another, jitted or not, for abstract arguments.

    With several devices it compiles for their mesh, which is its attribute `mesh`, and arguments
    with a sharding keep it. `tensor` of them form a group, between which weights are cut. Another
    GPU has another config and device.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # they ask a driver
        patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
        before = jax.config.jax_platforms
        jax.config.update("jax_platforms", "cpu")
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{devices}"
        )
        concrete = Mesh(np.array(topology.devices).reshape(-1, tensor), ("data", "tensor"))
        sharding = NamedSharding(concrete, PartitionSpec())
        shape = devices // tensor, tensor
        mesh = AbstractMesh(
            shape, concrete.axis_names, (AxisType.Auto,) * 2, abstract_device=device
        )

        def compiled(function, *args, options=None, **static):
            function = function if hasattr(function, "trace") else jax.jit(function)
            args = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(
                    a.shape, a.dtype, sharding=getattr(a, "sharding", None) or sharding
                ),
                args,
            )
            with jax.sharding.use_abstract_mesh(mesh):
                lowered = function.trace(*args, **static).lower(lowering_platforms=("cuda",))
                return lowered.compile(compiler_options=options)

        compiled.mesh = concrete
        yield compiled
        jax.config.update("jax_platforms", before)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def tiles(n, k, form="nvfp4"):
    """The abstract tiles of an [n, k] weight."""
    count = -(-n // 64), -(-k // 128)
    return layout.Fp4Tiles(
        codes=array(*count, layout.CODE_WORDS, dtype=jnp.uint32),
        scales=array(*count, layout.SCALE_WORDS[form], dtype=jnp.uint32),
        divisor=array(n, dtype=jnp.float32),
        inputs=k,
        format=form,
    )


def policy(config):
    """The abstract parameters of a policy in NVFP4, in the order of the Hopper kernel."""

    @functools.cache
    def arrays_of(number):
        layer = jax.eval_shape(
            lambda key: random_policy._random_layer(
                key, config, number, "nvfp4", jnp.dtype(jnp.bfloat16)
            ),
            jax.random.key(0),
        )
        return {
            name: QuantTensor(tiles=tiles(x.packed.shape[0], 2 * x.packed.shape[1]))
            if isinstance(x, QuantTensor)
            else x
            for name, x in layer.items()
        }

    kinds_of, table = layers_of(config), array(config.vocab_size, config.embed_dim)
    params = {
        "embed_tokens": table,
        "norm": array(config.embed_dim, dtype=jnp.float32),
        "layers": [arrays_of(kinds_of.index(kind)) for kind in kinds_of],
    }
    return params if config.tie_embeddings else params | {"lm_head": table}


def attention_inputs(
    rows, positions, *, kv_heads, group, head_dim=128, bias=True, qk_norm=False, dtype=jnp.bfloat16
):
    """Abstract arguments of attention, with as many partial mean squares as a product leaves."""
    outputs, float32 = kv_heads * (group + 2) * head_dim, jnp.float32
    angle = array(rows, head_dim // 2, dtype=float32)
    cache = array(rows, kv_heads, positions, head_dim, dtype=dtype)
    scale = array(head_dim, dtype=float32) if qk_norm else None
    return AttentionInputs(
        qkv=array(rows, outputs),
        square_partials=array(324, rows, dtype=float32),
        cosines=angle,
        sines=angle,
        lengths=array(rows, dtype=jnp.int32),
        bias=array(outputs) if bias else None,
        q_norm=scale,
        k_norm=scale,
        keys=cache,
        values=cache,
    )
