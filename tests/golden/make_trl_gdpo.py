"""Writes trl_gdpo.npz, TRL's advantages for several rewards that are normalized, then summed.

`rewards` [P, G, N] are fixed: all rewards of one group are equal, one reward of another group is,
and three are missing (NaN), of which two are all the rewards of one completion. `weights` [N] are
the weights. `advantages` [P, G] are those of multi_objective_aggregation="normalize_then_sum".

The method around them, GRPOTrainer._generate_and_score_completions, needs a model. Its branch for
this aggregation is therefore taken from the source, and runs on a stand-in for the trainer.

Needs Python 3.12, torch==2.13.0 (CPU), transformers==5.23.0, trl==1.16.0, accelerate, numpy:

    python tests/golden/make_trl_gdpo.py
"""

import inspect
import pathlib
import textwrap
import types

import numpy as np
import torch
from trl.trainer import grpo_trainer

PATH = pathlib.Path(__file__).parent / "trl_gdpo.npz"
GROUP = 4


def branch():
    """The statements of TRL for this aggregation, as code."""
    source = inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions)
    begin = source.index("unscorable_mask = ")
    first = source[begin : source.index("\n", begin)]
    begin = source.index('elif self.multi_objective_aggregation == "normalize_then_sum":')
    lines = source[source.index("\n", begin) + 1 : source.index("else:", begin)].rstrip()
    last = "advantages = torch.nan_to_num(advantages, nan=0.0)"
    assert last in source
    return "\n".join((first, textwrap.dedent(lines), last))


def main():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    rewards = torch.rand((5, GROUP, 3), generator=generator)
    rewards[:, :, 0] = (rewards[:, :, 0] > 0.5).float()
    rewards[1] = 0.25
    rewards[2, :, 1] = 1.0
    rewards[3, 1, :] = torch.nan
    rewards[4, 2, 0] = torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0])
    trainer = types.SimpleNamespace(reward_funcs=[None] * 3, reward_weights=weights)
    names = {
        "self": trainer,
        "rewards_per_func": rewards.reshape(-1, 3),
        "num_generations": GROUP,
        "device": torch.device("cpu"),
        "torch": torch,
        "nanstd": grpo_trainer.nanstd,
    }
    exec(branch(), names)
    advantages = names["advantages"].reshape(-1, GROUP)
    print(advantages)
    np.savez_compressed(PATH, rewards=rewards, weights=weights, advantages=advantages)


if __name__ == "__main__":
    main()
