"""Known errors in reinforcement learning of language models, and the tests that exclude them.

a denominator counts masked tokens                test_batch: truncated_rows_leave
an EOS is taken for padding                       test_batch: mask_follows_lengths
only one of several EOS ends a completion         test_engine: ends_with_any_eos
tokens after the EOS are attended to              test_batch: tokens_are_contiguous
padding changes the log-probabilities             test_transformer: padding_does_not_matter
a value per sequence is not masked                test_losses: masked_positions, for 'gspo'
exp before the mask makes NaN                     test_losses: masked_positions
micro-batches change the loss                     test_batch: micro_batches_have_the_loss
a resumed run has other samples or a lost buffer  test_resume
prompts are skipped around a checkpoint           test_resume; test_data: every_epoch
an adapter is loaded and not used                 test_train: start_from_an_adapter
merging the adapter into 4 bits loses it          nothing is merged; test_golden_peft
dynamic sampling is a flag without effect         test_train: dynamic_sampling_replaces
NaN spreads from one reward or metric             test_train: failing_rewards; test_metrics
an answer is right by its first digit             test_rewards: numeric_rewards
the sampler lags behind the trained adapter       here
the length penalty counts characters              here
the noise never reaches the model                 here; test_aqn: count_is_of_what_changed

Each entry names a test file and a part of the test's name.
"""

import numpy as np
import pytest
import tiny_run

from qerl_jax.errors import UserError
from qerl_jax.rewards.functions import overlong_penalty
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.training.loop import train


@pytest.fixture(scope="module")
def clean(tiny, tmp_path_factory):
    """A run without noise."""
    changes = {
        "aqn.schedule": "off",
        "rl.overlong_buffer": 4,
        "log.completions": 8,
        "eval.every": 0,
    }
    return train(tiny.config(changes), workdir=tmp_path_factory.mktemp("clean") / "run")


def test_the_sampler_has_the_adapter_of_the_step(clean):
    rows = tiny_run.results(clean)
    assert len(rows) == tiny_run.STEPS
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["logprob_diff_max"] < 1e-4 for row in rows)


def test_the_length_penalty_counts_tokens(clean):
    samples = read_jsonl(clean / "completions.jsonl")
    assert {sample["tokens"] for sample in samples} > {6}
    for sample in samples:
        assert len(sample["completion"]) >= sample["tokens"] - 1
        expected = overlong_penalty(sample["tokens"], 6, 4)
        assert sample["reward/overlong"] == pytest.approx(expected)


def fading(**_):
    """A noise schedule whose noise float32 rounds away from the fourth step on."""
    return lambda step: np.float32(0.01 if step < 3 else 1e-12)


def test_noise_that_will_change_nothing_is_an_error_before_the_first_step(tiny, tmp_path):
    changes = {"aqn.schedule": f"{__name__}:fading", "eval.every": 0}
    with pytest.raises(UserError, match="in step 4 changed no norm"):
        train(tiny.config(changes), workdir=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
