"""Programs of rollouts that other processes compile."""

import collections
import contextlib
import dataclasses
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import KEY, policy
from test_programs import HOW, compiled_ahead, complete
from tiny_model import random_lora, random_tokens, tiny_policy
from triton_kernel import on_gpu

from qerl_jax.policy.quant import quantize, tile_order
from qerl_jax.rollout import ahead, budget, decode, executables, helpers, programs
from qerl_jax.rollout.engine import SamplingConfig, generate
from qerl_jax.run.compilation_cache import cached_in

NAMES = ["jit(decode_chunk)", "jit(fuse_adapter)", "jit(read_prompts)", "jit(seat_rows)"]
# Takes all there is, and leaves nothing.
IDLE = """
import pickle, sys
pickle.load(sys.stdin.buffer)
print(flush=True)
for _ in sys.stdin.buffer: print(flush=True)
"""
BROKEN = "import sys; print(flush=True); sys.stdin.buffer.read(100); sys.exit('broken')"
FAILED = "import sys; sys.exit('failed')"
STUCK = "import time; print(flush=True); time.sleep(600)"


Team = helpers.Team


class Awaited(Team):
    """Helpers that take something, or end, before the process that needs it takes the rest."""

    def __enter__(self):
        super().__enter__()
        wait_until(lambda: self.handed_out() or self._served[0].done())
        return self


def wait_until(done):
    began = time.monotonic()
    while not done():
        assert time.monotonic() < began + 120
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(executables, "_keeps", lambda: True)


@pytest.fixture
def helped(monkeypatch):
    monkeypatch.setattr(ahead, "_helpers_for", lambda names, *_: min(1, len(names)))
    monkeypatch.setattr(helpers, "Team", Awaited)


@pytest.fixture
def lowered_here(monkeypatch):
    """What this process lowers, a helper does not."""
    names, lower = [], programs._lower
    monkeypatch.setattr(
        programs, "_lower", lambda program, *how: names.append(program) or lower(program, *how)
    )
    return names


def task(folder, *, quantized=False):
    """All programs of three prompts, for a helper, and its queue."""
    config, params, lora = policy(layers=1, quantized=quantized)
    sampling, eos_ids = HOW["sampling"], HOW["eos_ids"]
    plan = budget.make_plan(
        params, prompts=3, longest=9, group_size=1, config=config, sampling=sampling
    )
    shapes = [(plan, decode.rules(config, sampling, eos_ids))]
    bound = programs.bound((KEY, params, lora))
    with cached_in(folder):
        paths = executables.paths(programs.lowerings(bound, shapes), bound)
        return helpers.task_for(bound, shapes, paths, 2), collections.deque(range(len(paths)))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_helper_compiles_what_it_takes(quantized, tmp_path):
    told, queue = task(tmp_path, quantized=quantized)
    with helpers.Team(1, told, queue) as team:
        wait_until(lambda: not queue)
        wait_until(lambda: not team.at_work())
        assert not team.failures()
        assert team.handed_out() == list(range(len(told.paths)))
    loaded, compiled = compiled_ahead(tmp_path, quantized=quantized)
    assert not compiled
    jax.tree.map(
        np.testing.assert_array_equal,
        complete(loaded, quantized=quantized),
        complete({}, quantized=quantized),
    )


@pytest.mark.parametrize("change", ["sources", "folder"])
def test_a_helper_that_fails_says_why(change, tmp_path):
    told, queue = task(tmp_path)
    if change == "sources":  # They are edited while the process runs.
        told, reason = dataclasses.replace(told, origin="edited"), "programs would be others"
    else:
        path = tmp_path / "file" / "program"
        path.parent.touch()
        told = dataclasses.replace(told, paths=[path] * len(told.paths))
        reason = "File exists"
    with helpers.Team(1, told, queue) as team:
        wait_until(lambda: team._served[0].done())
        (failure,) = team.failures()
    assert reason in failure
    assert not list(tmp_path.glob("rollout-*"))


def test_programs_of_helpers_are_loaded_and_count_as_compiled(helped, lowered_here, tmp_path):
    counts = []
    ahead_of_time, compiled = compiled_ahead(
        tmp_path, on_progress=lambda done, total: counts.append((done, total))
    )
    assert sorted(compiled) == NAMES
    assert len(lowered_here) < len(NAMES)
    assert set(counts) >= {(done, len(NAMES)) for done in range(1, len(NAMES) + 1)}
    assert counts == sorted(counts)
    jax.tree.map(np.testing.assert_array_equal, complete(ahead_of_time), complete({}))
    assert not compiled_ahead(tmp_path)[1]


@pytest.mark.parametrize(
    ("code", "warning"),
    [(IDLE, None), (BROKEN, "ended: broken"), (FAILED, "ended: failed"), (STUCK, "kept none for")],
    ids=["idle", "broken", "failed", "stuck"],
)
def test_what_a_helper_leaves_undone_is_compiled(code, warning, helped, tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "_COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(ahead, "_PATIENCE", 1.0)
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        ahead_of_time, compiled = compiled_ahead(tmp_path)
    assert sorted(compiled) == NAMES
    jax.tree.map(np.testing.assert_array_equal, complete(ahead_of_time), complete({}))


def test_without_another_process_all_is_compiled(helped, tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "Team", Team)
    monkeypatch.setattr(helpers, "_COMMAND", ("/no/such/file",))
    with pytest.warns(UserWarning, match="No such file"):
        _, compiled = compiled_ahead(tmp_path)
    assert sorted(compiled) == NAMES


def test_helpers_end_with_what_they_help(helped, tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "_COMMAND", (sys.executable, "-c", STUCK))
    made, make = [], helpers._Helper
    monkeypatch.setattr(helpers, "_Helper", lambda: made.append(make()) or made[-1])

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiled_ahead(tmp_path, on_progress=stop)
    (helper,) = made
    assert helper.process.returncode == -signal.SIGKILL
    assert jax.config.jax_enable_compilation_cache


def test_a_helper_that_has_not_begun_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(ahead, "_helpers_for", lambda names, *_: min(2, len(names)))
    began = time.monotonic()
    _, compiled = compiled_ahead(tmp_path)
    assert sorted(compiled) == NAMES
    assert time.monotonic() < began + 300


def test_helpers_are_for_kernels_that_take_long_to_lower(tmp_path, monkeypatch):
    _, params, lora = policy(layers=1)
    bound = programs.bound((KEY, params, lora))
    names = [("decode_chunk", rows) for rows in range(6)]
    paths = dict.fromkeys(names, tmp_path)
    monkeypatch.setattr(ahead, "_CORES", 16)
    assert ahead._helpers_for(names, paths, bound) == 0  # No kernel runs here.
    monkeypatch.setattr(ahead.fp4_matmul, "supports_device", lambda: True)
    assert ahead._helpers_for(names, paths, bound) == 2
    assert ahead._helpers_for(names[1:], paths, bound) == 0
    assert ahead._helpers_for(names, {}, bound) == 0
    monkeypatch.setattr(ahead, "_CORES", 4)
    assert ahead._helpers_for(names, paths, bound) == 0


@pytest.mark.gpu
@on_gpu
def test_kernels_of_a_gpu_that_a_helper_compiled(helped, lowered_here, tmp_path):
    config, params = tiny_policy("llama", embed_dim=512, mlp_dim=640, head_dim=32)

    def stored(x):
        if x.ndim == 1:
            return x
        return tile_order(jax.tree.map(jnp.asarray, quantize([np.asarray(x)], format="nvfp4")))

    params["layers"] = [{n: stored(x) for n, x in layer.items()} for layer in params["layers"]]
    for name in {"embed_tokens", "lm_head"} & params.keys():
        params[name] = params[name].astype(jnp.bfloat16)
    lora, prompts = random_lora(config), np.asarray(random_tokens(64, 9)).tolist()
    how = {"config": config, "eos_ids": (3,), "group_size": 2}
    how["sampling"] = SamplingConfig(max_new_tokens=80, chunk_steps=4)

    def rollout(**ahead_of_time):
        return generate(KEY, params, lora, prompts, pad_id=0, **how, **ahead_of_time)

    expected = rollout()
    jax.clear_caches()
    with cached_in(tmp_path), ahead.compilations() as compiled:
        ready = ahead.compile_ahead(KEY, params, lora, prompts=64, prompt_width=9, **how)
    assert len(lowered_here) < len(compiled) == len(ready) == len(list(tmp_path.glob("rollout-*")))
    jax.tree.map(
        np.testing.assert_array_equal, rollout(compiled_ahead=ready, compiled=True), expected
    )
