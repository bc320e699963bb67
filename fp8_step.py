"""Temporary: a decode step of 4 layers of a 7B, e4m3 beside bfloat16. fp8_step.py compile|time FOLDER [M,...]"""
import collections, dataclasses, functools, json, os, pathlib, pickle, sys, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable
from benchmarks.rollout.random_policy import random_lora, random_params
from pallas_kernels import fp4_matmul, timing
from pallas_kernels.fp4_matmul import dispatch
from qerl_jax.policy import lora as lora_lib, transformer
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.weights.layer_memory import compact_layers

phase, folder = sys.argv[1], pathlib.Path(sys.argv[2])
MS = [int(m) for m in (sys.argv[3] if len(sys.argv) > 3 else "64,128,256").split(",")]
LAYERS, POSITIONS, FILLED, STEPS = int(os.environ.get("LAYERS", 4)), 768, 500, 16
folder.mkdir(parents=True, exist_ok=True)
start = time.time()
def say(*a): print(f"{time.time()-start:6.1f}", *a, flush=True)
dispatch.tiling.verified = lambda *a: True  # no self-test
dispatch._e4m3_agrees = lambda: True
import pallas_kernels.decode.layer, pallas_kernels.decode.attention_sm90
if phase == 'time': fp4_matmul.load_kernel()
config = dataclasses.replace(ARCHITECTURES["qwen2.5-7b"], num_layers=LAYERS, vocab_size=4096)
key = jax.random.key(0, impl="rbg")
params = random_params(key, config, format="nvfp4")
params |= {"layers": compact_layers(params["layers"])}
lora_layers = lora_lib.fuse(random_lora(key, config, rank=32), config, jnp.bfloat16)
jax.block_until_ready((params, lora_layers)); say("policy")

def cache_of(m):
    kv = [jax.random.normal(jax.random.key(i), (m, config.num_kv_heads, POSITIONS, config.head_dim), jnp.bfloat16) for i in range(2)]
    empty = transformer.empty_cache(config, m, POSITIONS, jnp.bfloat16) if hasattr(transformer, "empty_cache") else None
    _, cache, _ = jax.eval_shape(lambda p, l, t, n: transformer.prefill(p, l, t, n, config=config, cache_positions=POSITIONS), params, None, jax.ShapeDtypeStruct((m, 8), jnp.int32), jax.ShapeDtypeStruct((m,), jnp.int32))
    leaves, tree = jax.tree.flatten(cache.layers)
    leaves = [jnp.copy(kv[i % 2]) for i, x in enumerate(leaves)]
    return transformer.Cache(layers=jax.tree.unflatten(tree, leaves), lengths=jnp.full(m, FILLED, jnp.int32))

def step(params, lora_layers, tokens, cache):
    logits, cache, _ = transformer.decode_step(params, lora_layers, tokens, cache, config=config, rounds=os.environ["QERL_E4M3"] != "0")
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache, logits

def steps(params, lora_layers, tokens, cache):
    def body(carry, _):
        t, c, logits = step(params, lora_layers, *carry)
        return (t, c), None
    (t, c), _ = jax.lax.scan(body, (tokens, cache), None, length=STEPS)
    return t, c

def kernels_of(run):
    from jax.experimental.mosaic.gpu import profiler
    ext = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    jax.block_until_ready(run())
    ext._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        timings = ext._cupti_get_timings(True)
    return [(n, 1e-3 * t) for n, t in timings]

def sustained(run, seconds=2.0):
    """Steps a second over two seconds, and clock and power meanwhile."""
    import subprocess, tempfile
    log = tempfile.NamedTemporaryFile("w+", suffix=".csv", delete=False)
    p = subprocess.Popen(["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap,clocks_event_reasons.hw_slowdown", "--format=csv,noheader,nounits", "-lms", "50"], stdout=log, stderr=subprocess.STDOUT)
    time.sleep(.3)
    first = sum(1 for _ in open(log.name))
    run()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        run(); count += 1
    took = time.perf_counter() - began
    lines = open(log.name).read().splitlines()[first:]
    p.kill()
    middle = lines[len(lines) // 4:]
    return 1e6 * took / count, middle[len(middle) // 2:][:4], len(lines)

TUNED = dispatch.tiling._tuned(132)
names = lambda m, e: folder / f"step-{m}-{e}.pickle"
results = []
for m in MS:
    tokens = jax.random.randint(jax.random.key(5), (m,), 0, 4096)
    cache = cache_of(m)
    logits = {}
    for e in (i for i in map(int, os.environ.get('E', '0,1,2').split(',')) if i < 2 or m > 128):
        dispatch.tiling.choose.cache_clear(); dispatch.tiling._tuned = (lambda n: [x for x in TUNED if not x['config'].get('e4m3')]) if e == 2 else (lambda n: TUNED); dispatch.tiling._MULTICAST = e == 2
        os.environ["QERL_E4M3"] = str(e)
        if phase == "compile":
            jax.clear_caches()
            blobs = []
            for f in (step, steps):
                c = jax.jit(f, donate_argnums=(3,)).lower(params, lora_layers, tokens, cache).compile()
                blobs.append(serialize_executable.serialize(c))
            names(m, e).write_bytes(pickle.dumps(blobs)); say(m, e, "compiled")
            continue
        one, many = (serialize_executable.deserialize_and_load(*b) for b in pickle.loads(names(m, e).read_bytes()))
        box = [jax.tree.map(jnp.copy, cache)]
        def run():
            t, c, l = one(params, lora_layers, tokens, box.pop())
            box.append(dataclasses.replace(c, lengths=cache.lengths + 0)); return l
        logits[e] = run()
        measured = []
        for _ in range(3):
            kernels = kernels_of(run)
            measured.append(kernels)
        kernels = min(measured, key=lambda k: sum(t for _, t in k))
        total = 1e6 * sum(t for _, t in kernels)
        by = collections.Counter(); count = collections.Counter()
        for n, t in kernels: by[n[:40]] += 1e6 * t; count[n[:40]] += 1
        t, c = many(params, lora_layers, tokens, box.pop()); jax.block_until_ready(t)
        state = [t, c]
        def again():
            c = dataclasses.replace(state[1], lengths=cache.lengths + 0)
            t, c = many(params, lora_layers, tokens, c); jax.block_until_ready(t); state[:] = t, c
        again(); began = time.perf_counter(); again(); burst = 1e6 * (time.perf_counter() - began) / STEPS
        us, samples, n = sustained(again); walls = [us / STEPS]
        say(m, e, f"burst {burst:.0f} us, sustained {walls[0]:.0f} us a step; clock MHz, W: {samples} of {n}")
        say(m, ("bf16", "e4m3", "e4m3 multicast")[e], f"kernels {total:.0f} us, wall {min(walls):.0f} us a step, {len(kernels)} kernels")
        for n, t in by.most_common(14): say(f"      {t:8.1f} {count[n]:3d} {n}")
        results.append({"m": m, "e4m3": e, "us": total, "wall_us": min(walls), "kernels": dict(by)})
        if os.environ.get("RESULT"): (pathlib.Path(os.environ["RESULT"]) / f"step{os.environ.get('E', '')}.json").write_text(json.dumps(results, indent=1))
    if phase == "time":
        for e in list(logits)[1:] if 0 in logits else []:
          a, b = (logits[i].astype(jnp.float32) for i in (0, e))
          say(m, "logits: relative difference", e, float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)))
