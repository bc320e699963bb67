"""Sigma schedules and the noise on the norm scales."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

from benchmarks import router_noise
from qerl_jax.errors import UserError
from qerl_jax.policy import aqn, transformer
from qerl_jax.weights.load import load

START, END = 1e-2, 1e-4
DECAYING = ("exponential", "reference", "linear", "cosine", "logarithmic")


def schedule_of(name, *, stages, total_steps, sigma_start=START, sigma_end=END):
    return aqn.sigma_schedule(
        name, sigma_start=sigma_start, sigma_end=sigma_end, stages=stages, total_steps=total_steps
    )


def sigmas(name, *, stages, total_steps=None, **options):
    total_steps = total_steps or stages
    schedule = schedule_of(name, stages=stages, total_steps=total_steps, **options)
    return np.array([schedule(step) for step in range(total_steps)])


def test_reference_schedule_reaches_both_ends_in_equal_factors():
    expected = [0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]
    np.testing.assert_allclose(sigmas("reference", stages=10), expected, rtol=2e-3)


def test_exponential_schedule_of_the_paper_stops_one_factor_short():
    expected = [0.0] + [START * (END / START) ** ((k - 1) / 9) for k in range(1, 10)]
    np.testing.assert_allclose(sigmas("exponential", stages=10), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("linear", (START + END) / 2),
        ("cosine", (START + END) / 2),
        ("logarithmic", START + (END - START) * np.log10(5.5)),
        ("constant", START),
    ],
)
def test_schedule_in_the_middle(name, middle):
    last = START if name == "constant" else END
    np.testing.assert_allclose(
        sigmas(name, stages=4, total_steps=4), [0, START, middle, last], rtol=1e-6
    )


@pytest.mark.parametrize("name", DECAYING)
def test_noise_is_annealed(name):
    values = sigmas(name, stages=10, total_steps=100)
    assert values[0] == 0.0
    assert np.all(np.diff(values[10:]) <= 0)
    assert np.all(values[10:] >= END * (1 - 1e-6))
    assert len(set(values)) == 10


@pytest.mark.parametrize("name", aqn.SCHEDULES)
@pytest.mark.parametrize(("stages", "expected"), [(1, [0, 0, 0, 0]), (2, [0, 0, START, START])])
def test_one_and_two_stages(name, stages, expected):
    if name == "off":
        expected = [0, 0, 0, 0]
    np.testing.assert_allclose(sigmas(name, stages=stages, total_steps=4), expected, rtol=1e-6)


def test_remaining_steps_belong_to_the_last_stage():
    values = sigmas("linear", stages=3, total_steps=11)
    np.testing.assert_allclose(values, [0] * 3 + [START] * 3 + [END] * 5, rtol=1e-6)
    assert schedule_of("linear", stages=3, total_steps=11)(1000) == np.float32(END)


def test_fewer_steps_than_stages_take_one_step_each():
    np.testing.assert_array_equal(
        sigmas("reference", stages=10, total_steps=4), sigmas("reference", stages=10)[:4]
    )


def test_off_ignores_its_sigmas():
    assert not sigmas("off", stages=3, sigma_start=-1.0, sigma_end=0.0).any()


@pytest.mark.parametrize("name", ["exponential", "off"])
def test_schedule_can_be_traced(name):
    schedule = schedule_of(name, stages=5, total_steps=20)
    steps = jnp.arange(25)
    traced = jax.jit(jax.vmap(schedule))(steps)
    assert traced.dtype == jnp.float32
    np.testing.assert_array_equal(traced, [schedule(int(step)) for step in steps])


def custom_schedule(*, sigma_start, sigma_end, stages, total_steps):
    assert stages == 7
    return optax.linear_schedule(sigma_start, sigma_end, total_steps)


def test_custom_schedule_by_import_path():
    values = sigmas(f"{__name__}:custom_schedule", stages=7, total_steps=10)
    np.testing.assert_allclose(values, START + (END - START) * np.arange(10) / 10, rtol=1e-5)
    assert values.dtype == np.float32


def schedule_without_arguments():
    return lambda step: 0.1


def no_schedule(**_):
    return 0.1


def negative_schedule(**_):
    return lambda step: -0.1


def schedule_of_words(**_):
    return lambda step: "low"


def schedule_that_ends(**_):
    return lambda step: [0.1, 0.2][step]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (schedule_without_arguments, "failed: TypeError.*unexpected keyword argument"),
        (no_schedule, "at step 0 failed: TypeError: 'float' object is not callable"),
        (negative_schedule, "at step 0 failed: ValueError: sigma is -0.1"),
        (schedule_of_words, "at step 0 failed: "),
    ],
)
def test_custom_schedules_that_fail_are_errors_of_one_line_at_the_start(function, message):
    said = refused(message, sigmas, f"{__name__}:{function.__name__}", stages=5)
    assert function.__name__ in said
    assert "f(*, sigma_start, sigma_end, stages, total_steps)" in said


def test_a_custom_schedule_that_fails_later_names_its_step():
    schedule = schedule_of(f"{__name__}:schedule_that_ends", stages=5, total_steps=20)
    assert schedule(1) == np.float32(0.2)
    refused("at step 2 failed: IndexError", schedule, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "geometric"}, "geometric.*exponential"),
        ({"name": "no_such_module_here:f"}, "no_such_module_here"),
        ({"name": f"{__name__}:no_such_function"}, "no_such_function"),
        ({"stages": 0}, "stages .* 0"),
        ({"total_steps": 0}, "total_steps .* 0"),
        ({"sigma_end": 0.0}, "sigma_end=0.0.*greater than 0"),
        ({"name": "linear", "sigma_start": -1e-2}, "sigma_start=-0.01.*at least 0"),
    ],
)
def test_bad_schedules(options, message):
    defaults = {"name": "exponential", "stages": 10, "total_steps": 100}
    refused(message, schedule_of, **defaults | options)


DIM = 2048


def make_params(num_layers=3, scale=1.0):
    return {
        "embed_tokens": jnp.ones((4, DIM)),
        "norm": jnp.full(DIM, scale),
        "layers": [
            {
                "input_layernorm": jnp.full(DIM, scale),
                "post_attention_layernorm": jnp.full(DIM, scale),
                "q_norm": jnp.ones(8),
                "k_norm": jnp.ones(8),
                "o_proj": jnp.ones((2, 2)),
            }
            for _ in range(num_layers)
        ],
    }


def noise(params, noisy):
    """Returns the added noise by layer and norm."""
    return {
        (layer, name): np.asarray(new[name] - old[name])
        for layer, (old, new) in enumerate(zip(params["layers"], noisy["layers"], strict=True))
        for name in ("input_layernorm", "post_attention_layernorm")
    }


def bits(x):
    return np.asarray(x).view(np.uint32)


@pytest.mark.parametrize("final_norm", [False, True])
def test_only_the_norms_asked_for_change(final_norm):
    params = make_params()
    before = jax.tree.map(np.array, params)
    noisy = aqn.perturb_norms(jax.random.key(0), params, 1e-2, final_norm=final_norm)
    assert jax.tree.structure(noisy) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, before, params)
    assert noisy["embed_tokens"] is params["embed_tokens"]
    changed = 0
    for old, new in zip(params["layers"], noisy["layers"], strict=True):
        for name in ("q_norm", "k_norm", "o_proj"):
            assert new[name] is old[name]
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(noisy), strict=True):
        assert new.dtype == old.dtype
        changed += not np.array_equal(old, new)
    assert (noisy["norm"] is not params["norm"]) == final_norm
    assert changed == aqn.count_perturbed(params, noisy) == 6 + final_norm


@pytest.mark.parametrize("form", aqn.FORMS)
def test_sigma_zero_keeps_every_bit(form):
    params = make_params()
    params["layers"][0]["input_layernorm"] = jnp.array([-0.0, 0.0, 1e-45, 3.3] * (DIM // 4))
    noisy = aqn.perturb_norms(jax.random.key(0), params, 0.0, form=form, final_norm=True)
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(noisy), strict=True):
        np.testing.assert_array_equal(bits(old), bits(new))
    assert aqn.count_perturbed(params, noisy) == 0


@pytest.mark.parametrize(("form", "expected"), [("additive", 1.0), ("relative", 8.0)])
@pytest.mark.parametrize("sigma", [1e-2, 1e-4])
def test_noise_has_its_standard_deviation(form, expected, sigma):
    # At a scale of 8, a bfloat16 sum would round away nearly all noise of both sigmas.
    params = make_params(scale=8.0)
    noisy = aqn.perturb_norms(jax.random.key(1), params, sigma, form=form)
    values = np.concatenate(list(noise(params, noisy).values()))
    assert np.std(values) == pytest.approx(expected * sigma, rel=0.03)
    assert abs(np.mean(values)) < 0.03 * expected * sigma


def test_noise_is_keyed_by_layer_and_norm():
    params, key = make_params(), jax.random.key(2)
    drawn = noise(params, aqn.perturb_norms(key, params, 1.0))
    for layer in range(3):
        for index, name in enumerate(("input_layernorm", "post_attention_layernorm")):
            norm_key = jax.random.fold_in(jax.random.fold_in(key, layer), index)
            expected = jax.random.normal(norm_key, (DIM,))
            np.testing.assert_allclose(drawn[layer, name], expected, atol=1e-6)
    fewer = make_params(num_layers=2)
    fewer["layers"] = [dict(reversed(layer.items())) for layer in fewer["layers"]]
    again = noise(fewer, aqn.perturb_norms(key, fewer, 1.0, final_norm=True))
    for name, value in again.items():
        np.testing.assert_array_equal(value, drawn[name])
    other = noise(params, aqn.perturb_norms(jax.random.key(3), params, 1.0))
    stacked = np.stack([*drawn.values(), *other.values()])
    assert np.abs(np.corrcoef(stacked) - np.eye(12)).max() < 0.1


def test_the_count_of_perturbed_norms():
    # Float32 rounds noise of 1e-12 away. A change to a q_norm is counted, too.
    params = make_params()
    noisy = aqn.perturb_norms(jax.random.key(0), params, 1e-12)
    assert aqn.count_perturbed(params, noisy) == 0
    noisy["layers"][1]["q_norm"] = jnp.zeros(8)
    assert aqn.count_perturbed(params, noisy) == 1


def test_sigma_can_be_traced():
    params, key = make_params(), jax.random.key(4)
    perturb = jax.jit(lambda sigma: aqn.perturb_norms(key, params, sigma, final_norm=True))
    for sigma in (0.0, 1e-2):
        eager = aqn.perturb_norms(key, params, sigma, final_norm=True)
        jax.tree.map(np.testing.assert_array_equal, perturb(sigma), eager)


def test_unknown_form():
    with pytest.raises(UserError, match="multiplicative"):
        aqn.perturb_norms(jax.random.key(0), make_params(), 1e-2, form="multiplicative")


def test_routes_that_noise_flips_are_counted():
    """Those of rows, by what `prefill` returns of a trained mixture."""
    folder = pathlib.Path(__file__).parent / "golden" / "trained_moe"
    model = load(str(folder), format="bf16", dtype="float32")
    text = np.load(folder / "held_out.npy")[:8].astype(np.int32)
    lengths = np.full(len(text), text.shape[1], np.int32)

    @jax.jit
    def routes(params):
        options = {"config": model.config, "cache_positions": text.shape[1]}
        return transformer.prefill(params, None, text, lengths, **options)[2]

    for sigma in (0.0, 0.05):
        found = router_noise.measure(model, text, form="additive", sigma=sigma, draws=1)
        noisy = aqn.perturb_norms(jax.random.key(0), model.params, sigma)
        sets = (np.sort(routes(params)) for params in (model.params, noisy))
        differs = (next(sets) != next(sets)).any(axis=-1)
        assert found["routers"] == pytest.approx(differs.mean(), abs=2e-3)
        assert found["tokens"] == pytest.approx(differs.any(axis=0).mean(), abs=4e-3)
        assert (found["kl"] == 0) == (sigma == 0)
        assert found["kl_same_routes"] <= found["kl"]
    assert found["tokens"] > 0.05
