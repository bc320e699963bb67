"""The functions of `decode` for a policy whose weights are cut between devices.

Each is a `shard_map` over all devices of the mesh, in which a device runs the function of `decode`
on its shards, with the architecture of one device (`tensor_parallel.shard_of`). The devices have
equal logits, keys and rows, so they sample equal tokens. The arguments are those of `decode`.
"""

import functools
import types
from typing import Any

from jax.sharding import Mesh

from qerl_jax.policy.collectives import TENSOR
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.layers.kinds import ALL_FUSED
from qerl_jax.policy.lora import Lora
from qerl_jax.policy.sharding import HEADS, WHOLE, on_mesh, specs
from qerl_jax.policy.transformer import Cache
from qerl_jax.rollout import decode, drafts
from qerl_jax.rollout.decode import UNTUNED, DecodeState, Prefilled

_STATE = DecodeState(
    layers=HEADS,  # pyrefly: ignore[bad-argument-type]  A spec in place of a list.
    lengths=WHOLE,  # pyrefly: ignore[bad-argument-type]
    rows=WHOLE,  # pyrefly: ignore[bad-argument-type]
    counts=WHOLE,  # pyrefly: ignore[bad-argument-type]
    last=WHOLE,  # pyrefly: ignore[bad-argument-type]
    ended=WHOLE,  # pyrefly: ignore[bad-argument-type]
    limits=WHOLE,  # pyrefly: ignore[bad-argument-type]
    history=WHOLE,  # pyrefly: ignore[bad-argument-type]
)


@functools.cache
def functions(mesh: Mesh) -> types.SimpleNamespace:
    """Returns the jitted functions of `decode` by their names.

    Args:
        mesh: devices that hold the policy together.
    """
    cache = Cache(layers=HEADS, lengths=WHOLE)  # pyrefly: ignore[bad-argument-type]
    return types.SimpleNamespace(
        prefill=on_mesh(
            _unwrap_jit(decode.prefill),
            mesh,
            # pyrefly: ignore[bad-argument-type]  Specs in place of arrays.
            out_specs=lambda *_, **__: Prefilled(logits=WHOLE, cache=cache),
            static=("model_config", "dtype", "width", "shared", "records_routes"),
            compiler_options=UNTUNED,
        ),
        insert_rows=on_mesh(
            _unwrap_jit(decode.insert_rows),
            mesh,
            out_specs=lambda *_, **__: (_STATE, WHOLE),
            static=("config",),
            donated=1,
        ),
        fuse_adapter=on_mesh(
            _unwrap_jit(decode.fuse_adapter),
            mesh,
            out_specs=functools.partial(_specs_of_fused, mesh),
            static=("model_config", "dtype"),
        ),
        decode_chunk=on_mesh(
            _unwrap_jit(decode.decode_chunk),
            mesh,
            out_specs=lambda *_, **__: (_STATE, WHOLE),
            static=("config", "steps"),
            donated=3,
            compiler_options=UNTUNED,
        ),
        draft_chunk=on_mesh(
            _unwrap_jit(decode.draft_chunk),
            mesh,
            out_specs=lambda *_, **__: (_STATE, WHOLE),
            static=("config", "steps", "positions"),
            donated=3,
            compiler_options=UNTUNED,
        ),
        begin_rows=on_mesh(
            drafts.begin,
            mesh,
            in_specs=lambda *_: (WHOLE, WHOLE, WHOLE),
            out_specs=lambda *_: WHOLE,
            donated=0,
        ),
        gather_rows=on_mesh(
            decode.gather_rows,
            mesh,
            in_specs=lambda *_: (HEADS, WHOLE),
            out_specs=lambda *_: HEADS,
        ),
        extend_rows=on_mesh(
            _unwrap_jit(decode.extend_rows),
            mesh,
            out_specs=lambda *_, **__: (WHOLE, HEADS, WHOLE),
            static=("model_config", "records_routes"),
            donated=2,
            compiler_options=UNTUNED,
        ),
        resume_rows=on_mesh(
            _unwrap_jit(decode.resume_rows),
            mesh,
            out_specs=lambda *_, **__: (_STATE, WHOLE),
            static=("config",),
            donated=1,
        ),
        take_row=on_mesh(
            _unwrap_jit(decode.take_row),
            mesh,
            out_specs=lambda *_, **__: HEADS,
            static=("model_config", "positions"),
        ),
        put_row=on_mesh(
            _unwrap_jit(decode.put_row),
            mesh,
            in_specs=lambda *_: (HEADS, HEADS, WHOLE),
            out_specs=lambda *_: HEADS,
            donated=0,
        ),
    )


def _unwrap_jit(function: Any) -> Any:
    return function.__wrapped__


def _specs_of_fused(
    mesh: Mesh, lora: Lora | None, *, model_config: ModelConfig, **static: Any
) -> Any:
    """The specs of what `decode.fuse_adapter` makes of a device's part of an adapter."""
    del static
    layers: list[dict] = [{}] * model_config.num_layers if lora is None else lora.layers
    fused = [
        {name: (0, 0) for name, members in ALL_FUSED.items() if adapters.keys() & set(members)}
        for adapters in layers
    ]
    return specs(fused, mesh.shape[TENSOR])
