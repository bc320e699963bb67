"""The order of the training problems: epochs, the shares of sources, and the curriculum."""

import collections
import json

import numpy as np
import pytest
import scipy.stats
from problem_sets import draw

from qerl_jax.data.order import (
    Cursor,
    Order,
    Source,
    SourcePosition,
    order_metrics,
    read_cursor,
    record_results,
    refill_turns,
    source_metrics,
)
from qerl_jax.errors import UserError


def single(size, **options):
    return Order((Source("", size),), **options)


def stored(cursor):
    """The cursor as a checkpoint gives it back."""
    return read_cursor(json.loads(json.dumps(cursor.to_json())))


@pytest.mark.parametrize("sizes", [(1,) * 21, (3, 7, 4, 7), (7, 7, 7), (20, 1), (21,)])
def test_every_epoch_has_every_problem_once_for_any_sizes(sizes):
    order = single(7, seed=5)
    whole, end = draw(order, Cursor(), 21)
    taken, cursor = [], Cursor()
    for size in sizes:
        part, cursor = draw(order, cursor, size)
        assert len(part) == size
        cursor = stored(cursor)
        taken += part
    assert taken == whole
    assert cursor == end == Cursor({"": SourcePosition(3, 0)})
    for epoch in range(3):
        assert set(taken[7 * epoch : 7 * epoch + 7]) == set(range(7))


def test_the_order_of_one_source_is_a_permutation_by_seed_and_epoch():
    """A run that is extended goes on in its order."""
    for seed in (0, 3, 2**32 - 1):
        taken, _ = draw(single(30, seed=seed), Cursor(), 60)
        epochs = [np.random.default_rng((seed, epoch)).permutation(30) for epoch in range(2)]
        assert taken == np.concatenate(epochs).tolist()
    first, second = taken[:30], taken[30:]
    assert first != second
    order = single(30, seed=2**32 - 1)
    at = Cursor({"": SourcePosition(1, 10)})
    assert draw(order, at, 5) == (second[10:15], Cursor({"": SourcePosition(1, 15)}))
    assert draw(order, at, 0) == ([], at)


@pytest.mark.parametrize("count", [0, 3])
def test_a_cursor_beyond_the_data_is_refused(count):
    at = Cursor({"": SourcePosition(0, 3)})
    with pytest.raises(UserError, match=f"at problem 3 of {count}: the training data is not what"):
        draw(single(count), at, 1)


def test_sources_are_drawn_by_their_weights():
    order = Order((Source("a", 5, 3.0), Source("b", 50, 1.0)), seed=2)
    taken, cursor = draw(order, Cursor(), 4)
    assert [place < 5 for place in taken].count(True) == 3
    for _ in range(10):
        more, cursor = draw(order, stored(cursor), 4)
        assert sum(place < 5 for place in more) == 3
    # 33 draws of 5 problems, 11 of 50; each source in the order that it has alone.
    assert (cursor.positions["a"].epoch, cursor.positions["a"].index) == (6, 3)
    assert (cursor.positions["b"].epoch, cursor.positions["b"].index) == (0, 11)
    whole, _ = draw(order, Cursor(), 44)
    ours = [place for place in whole if place < 5]
    assert ours == draw(single(5, seed=2), Cursor(), 33)[0]
    assert sorted(ours[:5]) == list(range(5))


def test_sources_take_turns_within_a_call():
    order = Order((Source("a", 20), Source("b", 20), Source("c", 20, 2.0)))
    taken, _ = draw(order, Cursor(), 8)
    numbers = order.sources_of(taken)
    assert numbers.tolist() == [2, 0, 1, 2, 2, 0, 1, 2]


def test_draws_that_replace_others_go_to_the_sources_that_lack_some():
    assert refill_turns([0, 3, 1], 8) == [1, 1, 2, 1, 1, 1, 2, 1]
    assert refill_turns([0, 0, 2], 3) == [2, 2, 2]


def test_sources_of_equal_problems_have_orders_of_their_own():
    order = Order((Source("a", 20), Source("b", 20)), seed=2)
    taken, _ = draw(order, Cursor(), 40)
    a, b = [i for i in taken if i < 20], [i - 20 for i in taken if i >= 20]
    assert sorted(a) == sorted(b) == list(range(20))
    assert a != b


@pytest.mark.parametrize("number", range(5))
def test_no_source_is_a_problem_ahead_of_its_share(number):
    rng = np.random.default_rng(number)
    sources = tuple(Source(f"s{i}", 9, float(rng.uniform(0.05, 5))) for i in range(2 + number))
    order, cursor, counts = Order(sources, seed=number), Cursor(), collections.Counter()
    for done in range(1, 300):
        (place,), cursor = draw(order, cursor, 1)
        counts[place // 9] += 1
        ahead = [counts[i] - done * share for i, share in enumerate(order.shares)]
        assert max(ahead) < 1
        assert min(ahead) > 1 - len(sources)


def measured(order, rates, of=10):
    """A cursor at which every problem was measured with `rates` of the last `of` completions."""
    correct = np.array(
        [[1.0] * round(rate * of) + [0.0] * (of - round(rate * of)) for rate in rates]
    )
    return record_results(order, Cursor(), range(len(rates)), correct)


def test_the_curriculum_draws_in_proportion_to_p_times_1_minus_p():
    rates = np.array([0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
    counts = np.zeros(6)
    for seed in range(3000):
        order = single(6, seed=seed, curriculum_share=1.0)
        (place,), after = draw(order, measured(order, rates), 1)
        assert (after.positions[""].epoch, after.positions[""].index) == (0, 0)
        counts[place] += 1
    expected = rates * (1 - rates)
    assert counts[expected == 0].sum() == 0
    positive = expected > 0
    expected = 3000 * expected[positive] / expected.sum()
    assert scipy.stats.chisquare(counts[positive], expected).pvalue > 1e-3


def test_the_share_of_the_curriculum_and_of_the_epoch():
    order = single(400, seed=1, curriculum_share=0.25)
    start = measured(order, [0.5] * 200)
    taken, cursor = draw(order, start, 160)
    assert len(set(taken)) == 160
    in_order = cursor.positions[""].index
    epoch = draw(single(400, seed=1), Cursor(), in_order)[0]
    assert set(epoch) <= set(taken)
    assert abs(160 - in_order - 40) < 3 * np.sqrt(160 * 0.25 * 0.75)
    of_curriculum = [place not in epoch for place in taken]
    assert all(place < 200 for place in np.array(taken)[of_curriculum])
    # A step that trains on the first groups of a larger rollout has its share of both kinds.
    assert abs(np.mean(of_curriculum[:80]) - np.mean(of_curriculum)) < 0.15
    # A draw for which no such problem is left goes on in the epoch; so does an unmeasured run.
    few = measured(order, [0.5, 0.0])
    taken, cursor = draw(order, few, 100, exclude=[0])
    assert cursor.positions[""].index == 100
    unmeasured = draw(order, Cursor(), 100)[0]
    assert sorted(unmeasured) == sorted(draw(single(400, seed=1), Cursor(), 100)[0])


def test_problems_that_are_sometimes_solved_are_drawn_more_often():
    """A policy with fixed success rates: the others are still drawn once an epoch."""
    rng, visits, cursor = np.random.default_rng(0), np.zeros(60), Cursor()
    rates = np.repeat([0.0, 0.5, 1.0], 20)
    order = single(60, curriculum_share=0.5)
    for _ in range(100):
        taken, cursor = draw(order, cursor, 8)
        visits[taken] += 1
        correct = (rng.random((8, 8)) < rates[taken][:, None]).astype(float)
        cursor = record_results(order, stored(cursor), taken, correct)
    epochs = cursor.positions[""].epoch
    for rate in (0.0, 1.0):
        # Once an epoch, and once more where the present epoch has reached it.
        assert set(visits[rates == rate].tolist()) <= {epochs, epochs + 1}
    assert visits[rates == 0.5].mean() > 2.5 * (epochs + 1)
    assert visits.sum() == 800


def test_draws_of_the_curriculum_follow_from_the_cursor():
    order = Order((Source("a", 30), Source("b", 30, 2.0)), seed=7, curriculum_share=0.5)

    def run(cursor, steps):
        taken = []
        for _ in range(steps):
            part, cursor = draw(order, cursor, 6)
            taken += part
            correct = np.array([[place % 2, 0.0, 1.0] for place in part])
            cursor = record_results(order, cursor, part, correct)
        return taken, cursor

    whole, end = run(Cursor(), 12)
    first, middle = run(Cursor(), 5)
    second, other_end = run(stored(middle), 7)
    assert first + second == whole
    assert end == other_end == stored(end)
    assert middle.positions["b"].results
    alone = draw(Order(order.sources, seed=8, curriculum_share=0.5), middle, 6)[0]
    assert alone != draw(order, middle, 6)[0]


def test_a_record_holds_the_last_group_and_no_missing_scores():
    order = Order((Source("a", 2), Source("b", 2)), curriculum_share=0.5)
    nan = np.nan
    cursor = record_results(
        order, Cursor(), [0, 3, 2], np.array([[1, 0, nan], [1, 1, 1], [nan] * 3])
    )
    assert {name: place.results for name, place in cursor.positions.items()} == {
        "a": {0: (1, 2)},
        "b": {1: (3, 3)},
    }
    later = record_results(order, cursor, [0], np.array([[0.0, 0.0, 0.0]]))
    assert later.positions["a"].results == {0: (0, 3)}
    assert record_results(Order(order.sources), Cursor(), [0], np.ones((1, 2))) == Cursor()
    assert cursor.without_scores() == Cursor({"a": SourcePosition(), "b": SourcePosition()})


def test_metrics_of_the_curriculum():
    order = single(10, curriculum_share=0.5)
    before = measured(order, [0.5, 0.0, 1.0])
    after = record_results(order, before, [0, 1, 5], np.ones((3, 2)))
    found = order_metrics(order, before, after, [0, 1, 5])
    assert found == {
        "curriculum/success_rate": 0.25,
        "curriculum/measured": pytest.approx(2 / 3),
        "curriculum/seen": 0.4,
    }
    assert np.isnan(order_metrics(order, before, after, [7])["curriculum/success_rate"])
    assert order_metrics(single(10), before, after, [0]) == {}


def test_metrics_of_the_sources():
    order = Order((Source("a", 5), Source("b", 5), Source("c", 5)))
    rewards = np.array([[1.0, 2.0], [np.nan, 3.0], [5.0, 5.0]])
    found = source_metrics(order, [0, 7, 4], {"reward": rewards})
    assert found["source/a/reward"] == pytest.approx(13 / 4)
    assert found["source/b/reward"] == 3.0
    assert np.isnan(found["source/c/reward"])
    assert [found[f"source/{name}/share"] for name in "abc"] == pytest.approx([2 / 3, 1 / 3, 0])
    trained = source_metrics(order, [0, 7, 4], {"reward": rewards}, [7])
    assert trained["source/a/reward"] == pytest.approx(13 / 4)
    assert [trained[f"source/{name}/share"] for name in "abc"] == [0, 1, 0]
    assert source_metrics(single(5), [0, 1, 2], {"reward": rewards}) == {}
