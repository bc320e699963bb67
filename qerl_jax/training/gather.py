"""A rollout that several processes made and scored, put together in each of them.

Each process samples and scores its own prompts with all of their completions, and then tells the
others what it has, so that advantages, buffers and metrics are those of the whole step and the same
in every process. A completion of n tokens takes 12 n bytes.
"""

import dataclasses
import json
from collections.abc import Sequence

import jax
import numpy as np

from qerl_jax.processes.group import Processes
from qerl_jax.rewards.score import Scores
from qerl_jax.rollout.completions import Rollout
from qerl_jax.rollout.replicas import deal
from qerl_jax.rollout.scheduler import Statistics


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scored completions of prompts, G of each.

    Attributes:
        rollout: the completions as tokens.
        scores: their rewards.
        statistics: work of the engine, by rollout.
        seconds: duration of the rollout.
    """

    rollout: Rollout
    scores: Scores
    statistics: list[Statistics]
    seconds: float


def own_prompts(lengths: Sequence[int], processes: Processes) -> np.ndarray:
    """Returns the indices of the prompts that this process samples, dealt out by expected work.

    Args:
        lengths: number of tokens of each prompt.
        processes: the processes of the run.
    """
    return deal(lengths, processes.count)[processes.index]


def gathered(own: Scored, lengths: Sequence[int], pad_id: int, processes: Processes) -> Scored:
    """Returns the completions of all prompts.

    Args:
        own: the completions of `own_prompts`, in their order.
        lengths: number of tokens of each prompt of all processes.
        pad_id: token id that follows the end of a completion.
        processes: the processes of the run.
    """
    if processes.count == 1:
        return own
    shares = processes.exchange(_share(own))
    places = deal(lengths, processes.count)
    group = len(own.rollout.lengths) // len(places[processes.index])
    rows = [(place[:, None] * group + np.arange(group)).reshape(-1) for place in places]
    size, width = len(lengths) * group, own.rollout.tokens.shape[1]

    def together(name: str) -> np.ndarray:
        whole = np.zeros(size, shares[0][name].dtype)
        for share, found in zip(shares, rows, strict=True):
            whole[found] = share[name]
        return whole

    def wide(name: str, fill: int) -> np.ndarray:
        """Rows [B, C] of what is exchanged without the padding."""
        whole = np.full((size, width), fill, shares[0][name].dtype)
        for share, found in zip(shares, rows, strict=True):
            part = np.full((len(found), width), fill, whole.dtype)
            part[np.arange(width) < share["lengths"][:, None]] = share[name]
            whole[found] = part
        return whole

    told = [json.loads(str(share["told"])) for share in shares]
    return Scored(
        rollout=Rollout(
            tokens=wide("tokens", pad_id),
            lengths=together("lengths"),
            finished=together("finished"),
            logprobs=wide("logprobs", 0),
            entropies=wide("entropies", 0),
        ),
        scores=Scores(
            total=together("total"),
            parts={name: together(f"part/{name}") for name in own.scores.parts},
            errors=[error for one in told for error in one["errors"]],
            seconds=max(one["reward_seconds"] for one in told),
        ),
        statistics=[Statistics(*work) for one in told for work in one["statistics"]],
        seconds=max(one["seconds"] for one in told),
    )


def _share(own: Scored) -> dict[str, np.ndarray]:
    rollout, scores = own.rollout, own.scores
    sampled = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    told = {
        "errors": scores.errors,
        "reward_seconds": scores.seconds,
        "statistics": [dataclasses.astuple(work) for work in own.statistics],
        "seconds": own.seconds,
    }
    share = {
        "tokens": rollout.tokens[sampled],
        "logprobs": rollout.logprobs[sampled],
        "entropies": rollout.entropies[sampled],
        "lengths": rollout.lengths,
        "finished": rollout.finished,
        "total": scores.total,
        "told": np.array(json.dumps(told)),
    }
    share |= {f"part/{name}": values for name, values in scores.parts.items()}
    return jax.tree.map(np.asarray, share)
