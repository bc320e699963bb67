"""The scored completions of a step: put together from rollouts and from processes.

Each process samples and scores its own prompts with all of their completions, and then tells the
others what it has, so that advantages, buffers and metrics are those of the whole step and the same
in every process. A completion of n tokens takes 12 n bytes.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from qerl_jax.data.prompts import Prompt
from qerl_jax.rewards.scores import Scores
from qerl_jax.rollout.completions import Rollout, detokenize
from qerl_jax.rollout.config import Tokenizer
from qerl_jax.rollout.progress import Statistics
from qerl_jax.rollout.replicas import rows_of


class Peers(Protocol):
    """The part of `processes.group.Processes` that a step uses.

    Attributes:
        index: number of this process.
        count: number of all processes.
    """

    index: int
    count: int

    def exchange(self, share: Mapping[str, np.ndarray], /) -> list[dict[str, np.ndarray]]:
        """Returns the arrays that each process hands in."""
        ...


@dataclasses.dataclass(frozen=True)
class Experience:
    """Scored completions of P prompts, G of each; the rows of a group are neighbors (B = P G).

    Attributes:
        prompts: P prompts.
        places: P places of the prompts among the training prompts.
        texts: B completions as text.
        rollout: B completions as tokens.
        scores: rewards of the B completions.
        statistics: work of the devices, by rollout.
        seconds: duration of the rollouts.
    """

    prompts: list[Prompt]
    places: list[int]
    texts: list[str]
    rollout: Rollout
    scores: Scores
    statistics: list[Statistics]
    seconds: float

    @property
    def group_size(self) -> int:
        """G, the number of completions of each prompt."""
        return len(self.texts) // len(self.prompts)

    @property
    def row_prompts(self) -> list[Prompt]:
        """The prompt of each of the B completions."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]


def concatenate(parts: Sequence[Experience]) -> Experience:
    """Returns the completions of several rollouts, one after the other."""
    scores = [part.scores for part in parts]
    return Experience(
        prompts=[prompt for part in parts for prompt in part.prompts],
        places=[place for part in parts for place in part.places],
        texts=[text for part in parts for text in part.texts],
        rollout=jax.tree.map(lambda *x: np.concatenate(x), *(part.rollout for part in parts)),
        scores=Scores(
            total=np.concatenate([part.total for part in scores]),
            parts={
                name: np.concatenate([part.parts[name] for part in scores])
                for name in scores[0].parts
            },
            errors=[error for part in scores for error in part.errors],
            seconds=sum(part.seconds for part in scores),
        ),
        statistics=[work for part in parts for work in part.statistics],
        seconds=sum(part.seconds for part in parts),
    )


def choose(experience: Experience, groups: np.ndarray) -> Experience:
    """Returns some of the groups; errors, work and times stay those of all.

    Args:
        experience: the completions of P prompts.
        groups: indices of the prompts to keep, ascending.
    """
    rows = rows_of(groups, experience.group_size)
    scores = experience.scores
    return dataclasses.replace(
        experience,
        prompts=[experience.prompts[group] for group in groups],
        places=[experience.places[group] for group in groups],
        texts=[experience.texts[row] for row in rows],
        rollout=jax.tree.map(lambda x: x[rows], experience.rollout),
        scores=dataclasses.replace(
            scores,
            total=scores.total[rows],
            parts={name: values[rows] for name, values in scores.parts.items()},
        ),
    )


def gather(
    own: Experience,
    drawn: Sequence[Prompt],
    places: Sequence[int],
    shares: Sequence[np.ndarray],
    *,
    tokenizer: Tokenizer,
    processes: Peers,
) -> Experience:
    """Returns the completions of all processes, in the order in which the prompts were drawn.

    Args:
        own: the completions of this process.
        drawn: P prompts of all processes.
        places: P places of the prompts among the training prompts.
        shares: indices among the P prompts of those that each process sampled.
        tokenizer: tokenizer of the policy.
        processes: the processes of the run.
    """
    if processes.count == 1:
        return own
    told = processes.exchange(_told(own))
    rows = [rows_of(share, own.group_size) for share in shares]
    size, width = len(drawn) * own.group_size, own.rollout.tokens.shape[1]

    def together(name: str) -> np.ndarray:
        whole = np.zeros(size, told[0][name].dtype)
        for part, part_rows in zip(told, rows, strict=True):
            whole[part_rows] = part[name]
        return whole

    def wide(name: str, fill: int) -> np.ndarray:
        """Rows [B, C] of what is exchanged without the padding."""
        whole = np.full((size, width), fill, told[0][name].dtype)
        for part, part_rows in zip(told, rows, strict=True):
            padded = np.full((len(part_rows), width), fill, whole.dtype)
            padded[np.arange(width) < part["lengths"][:, None]] = part[name]
            whole[part_rows] = padded
        return whole

    others = [json.loads(str(part["told"])) for part in told]
    rollout = Rollout(
        tokens=wide("tokens", tokenizer.pad_id),
        lengths=together("lengths"),
        finished=together("finished"),
        logprobs=wide("logprobs", 0),
        entropies=wide("entropies", 0),
    )
    return Experience(
        prompts=list(drawn),
        places=list(places),
        texts=detokenize(rollout, tokenizer.decode),
        rollout=rollout,
        scores=Scores(
            total=together("total"),
            parts={name: together(f"part/{name}") for name in own.scores.parts},
            errors=[error for one in others for error in one["errors"]],
            seconds=max(one["reward_seconds"] for one in others),
        ),
        statistics=[Statistics(*work) for one in others for work in one["statistics"]],
        seconds=max(one["seconds"] for one in others),
    )


def _told(own: Experience) -> dict[str, np.ndarray]:
    """What a process tells the others."""
    rollout, scores = own.rollout, own.scores
    sampled = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    told = {
        "errors": scores.errors,
        "reward_seconds": scores.seconds,
        "statistics": [dataclasses.astuple(work) for work in own.statistics],
        "seconds": own.seconds,
    }
    arrays = {
        "tokens": rollout.tokens[sampled],
        "logprobs": rollout.logprobs[sampled],
        "entropies": rollout.entropies[sampled],
        "lengths": rollout.lengths,
        "finished": rollout.finished,
        "total": scores.total,
        "told": np.array(json.dumps(told)),
    }
    arrays |= {f"part/{name}": values for name, values in scores.parts.items()}
    return jax.tree.map(np.asarray, arrays)
