"""A stand-in: dense mask."""
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, numpy as np

class Segments(NamedTuple):
    ids: Any
    key_runs: Any
    query_runs: Any

def segments(ids):
    t=-(-len(ids)//128)
    return Segments(np.asarray(ids,np.int32), np.zeros((t,4),np.int32), np.zeros((t,2),np.int32))

def attend_packed(q,k,v,segments):
    T,N,H=q.shape; K=k.shape[1]
    ids=segments.ids; i=jnp.arange(T)
    visible=(i[:,None]>=i)&((ids[:,None]==ids)|((ids[:,None]&~4095)==ids))
    q=q.reshape(T,K,N//K,H)
    s=jnp.einsum("tkgh,skh->kgts",q,k,preferred_element_type=jnp.float32)*H**-0.5
    p=jax.nn.softmax(jnp.where(visible,s,-jnp.inf)).astype(v.dtype)
    return jnp.einsum("kgts,skh->tkgh",p,v).reshape(T,N,H)
