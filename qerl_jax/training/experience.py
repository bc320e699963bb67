"""The scored completions of a step, gathered from rollouts and from processes.

Each process samples and scores its own prompts with all of their completions, and then sends the
results to the others, so that advantages, buffers and metrics are those of the whole step and the
same in every process. A completion of n tokens takes 12 n bytes, and of a mixture of experts n L k
more for its routes. A conversation takes n more for its roles, and its texts twice: as they are,
and as messages.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from qerl_jax.data.prompts import Prompt
from qerl_jax.environments.episodes import Episode
from qerl_jax.environments.roles import DONE
from qerl_jax.rewards.scored import Scores
from qerl_jax.rollout.completions import Rollout, detokenize
from qerl_jax.rollout.config import Tokenizer
from qerl_jax.rollout.progress import Statistics
from qerl_jax.rollout.replicas import rows_of


class Peers(Protocol):
    """The part of `processes.group.Processes` that a step uses; one of `count` processes."""

    index: int
    count: int

    def exchange(self, share: Mapping[str, np.ndarray], /) -> list[dict[str, np.ndarray]]:
        """Returns the arrays that each process hands in."""
        ...


@dataclasses.dataclass(frozen=True)
class Experience:
    """Scored completions of P prompts, G of each; the rows of a group are neighbors (B = P G).

    The completions of agents are sessions.
    """

    prompts: list[Prompt]  # P prompts
    places: list[int]  # P places of the prompts among the training prompts
    texts: list[str]  # B completions as text
    rollout: Rollout  # B completions as tokens
    scores: Scores  # rewards of the B completions
    statistics: list[Statistics]  # work of the devices, by rollout
    seconds: float  # duration of the rollouts
    # What happened between each row and its environment; [] without environments, whose texts are
    # those of the last turns.
    episodes: list[Episode] = dataclasses.field(default_factory=list)
    # Of agents, each of whose B sessions has any number of rows B': number [B'] of the session of
    # each row of the rollout, and the token ids of its prompt. None and [] without agents.
    owners: np.ndarray | None = None
    own_prompts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    @property
    def group_size(self) -> int:
        """G, the number of completions of each prompt."""
        return len(self.texts) // len(self.prompts)

    @property
    def row_prompts(self) -> list[Prompt]:
        """The prompt of each of the B completions."""
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]

    @property
    def prompt_ids(self) -> list[tuple[int, ...]]:
        """The token ids of the prompt of each row of the rollout."""
        return self.own_prompts if self.owners is not None else [p.ids for p in self.row_prompts]

    @property
    def lengths(self) -> np.ndarray:
        """The number of sampled tokens of each of the B completions, int [B]."""
        sampled = self.rollout.sampled_lengths
        if self.owners is None:
            return sampled
        return np.bincount(self.owners, sampled, len(self.texts)).astype(np.int32)

    @property
    def finished(self) -> np.ndarray:
        """Whether each of the B completions ended by itself, bool [B]."""
        if self.owners is None:
            return self.rollout.finished
        return np.array([episode.ending == DONE for episode in self.episodes], bool)

    def of_rows(self, values: np.ndarray) -> np.ndarray:
        """Returns for each row of the rollout the value [B] of its completion."""
        return values if self.owners is None else values[self.owners]


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
        episodes=[episode for part in parts for episode in part.episodes],
        owners=_concatenate_owners(parts),
        own_prompts=[ids for part in parts for ids in part.own_prompts],
    )


def _concatenate_owners(parts: Sequence[Experience]) -> np.ndarray | None:
    owners, start = [], 0
    for part in parts:
        if part.owners is None:
            return None
        owners.append(start + part.owners)
        start += len(part.texts)
    return np.concatenate(owners)


def choose(experience: Experience, groups: np.ndarray) -> Experience:
    """Returns some of the groups; errors, work and times stay those of all.

    `groups` are the indices of the prompts to keep, ascending.
    """
    rows = rows_of(groups, experience.group_size)
    scores, of_rollout = experience.scores, rows
    if (owners := experience.owners) is not None:
        number = np.full(len(experience.texts), -1)
        number[rows] = np.arange(len(rows))
        of_rollout = np.flatnonzero(number[owners] >= 0)
        experience = dataclasses.replace(
            experience,
            owners=number[owners[of_rollout]],
            own_prompts=[experience.own_prompts[row] for row in of_rollout],
        )
    return dataclasses.replace(
        experience,
        prompts=[experience.prompts[group] for group in groups],
        places=[experience.places[group] for group in groups],
        texts=[experience.texts[row] for row in rows],
        rollout=jax.tree.map(lambda x: x[of_rollout], experience.rollout),
        episodes=[experience.episodes[row] for row in rows] if experience.episodes else [],
        scores=dataclasses.replace(
            scores,
            total=scores.total[rows],
            parts={name: values[rows] for name, values in scores.parts.items()},
        ),
    )


def gather(
    local: Experience,
    prompts: Sequence[Prompt],
    places: Sequence[int],
    shares: Sequence[np.ndarray],
    *,
    tokenizer: Tokenizer,
    processes: Peers,
) -> Experience:
    """Returns the completions of all processes, in the order in which the prompts were drawn.

    `prompts` and `places` are those of all processes, and `shares` the indices among the P prompts
    of those that each process sampled. What environments said at their reset is not in `prompts`.
    """
    if processes.count == 1:
        return local
    parts = processes.exchange(_exchange_arrays(local))
    episodes = []
    if local.episodes:
        prompts, episodes = _gather_conversations(parts, prompts, shares)
    rows = [rows_of(share, local.group_size) for share in shares]
    numbers = np.concatenate(rows)  # of the completions, in the order of the processes
    order = by_row = np.argsort(numbers)
    owners, own_prompts, copies = None, list[tuple[int, ...]](), local.group_size
    if local.owners is not None:
        of_parts = zip(rows, parts, strict=True)
        owners = np.concatenate([own_rows[part["owners"]] for own_rows, part in of_parts])
        by_row = np.argsort(owners, kind="stable")
        owners, own_prompts, copies = owners[by_row], _gather_own_prompts(parts, by_row), 1
    ends = np.cumsum([len(part["lengths"]) for part in parts])[:-1]
    of_rows = np.split(np.argsort(by_row), ends)  # the rows of each process, in the order of all
    width = local.rollout.tokens.shape[1]

    def gather_values(name: str, order: np.ndarray) -> np.ndarray:
        return np.concatenate([part[name] for part in parts])[order]

    def gather_padded(name: str, fill: int) -> np.ndarray:
        """Rows [B, C] of what is exchanged without the padding."""
        lengths = np.concatenate([part["lengths"] for part in parts])
        array = np.full((len(lengths), width), fill, parts[0][name].dtype)
        array[np.arange(width) < lengths[:, None]] = np.concatenate([part[name] for part in parts])
        return array[by_row]

    def gather_routes(name: str, lengths: np.ndarray, copies: int) -> np.ndarray | None:
        """Arrays [B] of the routes of as many tokens, each of which some rows share."""
        if local.rollout.routes is None:
            return None
        array = np.empty(len(lengths), object)
        for part, part_rows in zip(parts, of_rows, strict=True):
            if len(part_rows):
                array[part_rows] = split_routes(part[name], lengths[part_rows[::copies]], copies)
        return array

    facts = [json.loads(str(part["facts"])) for part in parts]
    lengths, group_size = gather_values("lengths", by_row), local.group_size
    prompt_lengths = np.array([len(ids) for ids in own_prompts], int)
    if owners is None:
        prompt_lengths = np.repeat([len(prompt.ids) for prompt in prompts], group_size)
    rollout = Rollout(
        tokens=gather_padded("tokens", tokenizer.pad_id),
        lengths=lengths,
        finished=gather_values("finished", by_row),
        logprobs=gather_padded("logprobs", 0),
        entropies=gather_padded("entropies", 0),
        roles=gather_padded("roles", 0) if episodes else None,
        endings=gather_values("endings", by_row) if episodes else None,
        routes=gather_routes("routes", lengths, 1),
        prompt_routes=gather_routes("prompt_routes", prompt_lengths, copies),
    )
    return Experience(
        prompts=list(prompts),
        places=list(places),
        texts=[one.answer for one in episodes] or detokenize(rollout, tokenizer.answer),
        rollout=rollout,
        scores=Scores(
            total=gather_values("total", order),
            parts={name: gather_values(f"part/{name}", order) for name in local.scores.parts},
            errors=[error for part_facts in facts for error in part_facts["errors"]],
            seconds=max(part_facts["reward_seconds"] for part_facts in facts),
        ),
        statistics=[Statistics(*work) for part_facts in facts for work in part_facts["statistics"]],
        seconds=max(part_facts["seconds"] for part_facts in facts),
        episodes=episodes,
        owners=owners,
        own_prompts=own_prompts,
    )


def routes_of(rollout: Rollout, copies: int = 1) -> dict[str, np.ndarray]:
    """Returns the recorded routes one after the other, without padding.

    Those of prompts are there once for `copies` rows that share them.
    """
    if rollout.routes is None or not len(rollout.lengths):
        return {}
    own = zip(rollout.routes, rollout.lengths, strict=True)
    return {
        "routes": np.concatenate([routes[:length] for routes, length in own]),
        "prompt_routes": np.concatenate(rollout.prompt_routes[::copies]),
    }


def split_routes(routes: np.ndarray, lengths: np.ndarray, copies: int = 1) -> np.ndarray:
    """Returns the object array [B] of what `routes_of` has put one after the other."""
    array = np.empty(len(lengths) * copies, object)
    for number, own in enumerate(np.split(routes, np.cumsum(lengths)[:-1])):
        for row in range(number * copies, (number + 1) * copies):
            array[row] = own
    return array


def _gather_own_prompts(
    parts: Sequence[Mapping[str, np.ndarray]], order: np.ndarray
) -> list[tuple[int, ...]]:
    lengths = np.concatenate([part["own_lengths"] for part in parts])
    ids = np.concatenate([part["own_prompts"] for part in parts])
    ends = np.cumsum(lengths)
    return [tuple(ids[ends[row] - lengths[row] : ends[row]].tolist()) for row in order]


def _gather_conversations(
    parts: Sequence[Mapping[str, np.ndarray]],
    prompts: Sequence[Prompt],
    shares: Sequence[np.ndarray],
) -> tuple[list[Prompt], list[Episode]]:
    """Returns the prompts with what environments said at their reset, and the episodes of all."""
    gathered, groups = list(prompts), list[list[Episode]]([[]] * len(prompts))
    for part, share in zip(parts, shares, strict=True):
        said = json.loads(part["conversations"].tobytes())
        for number, (text, ids, episodes) in zip(share.tolist(), said, strict=True):
            gathered[number] = dataclasses.replace(prompts[number], text=text, ids=tuple(ids))
            groups[number] = [Episode(**values) for values in episodes]
    for episode in (every := list(itertools.chain(*groups))):
        episode.parts = [(role, text) for role, text in episode.parts]
    return gathered, every


def _exchange_arrays(local: Experience) -> dict[str, np.ndarray]:
    """The arrays of this process's completions that it sends to the other processes."""
    rollout, scores = local.rollout, local.scores
    sampled = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    facts = {
        "errors": scores.errors,
        "reward_seconds": scores.seconds,
        "statistics": [dataclasses.astuple(work) for work in local.statistics],
        "seconds": local.seconds,
    }
    arrays = {
        "tokens": rollout.tokens[sampled],
        "logprobs": rollout.logprobs[sampled],
        "entropies": rollout.entropies[sampled],
        "lengths": rollout.lengths,
        "finished": rollout.finished,
        "total": scores.total,
        "facts": np.array(json.dumps(facts)),
    }
    arrays |= routes_of(rollout, 1 if local.owners is not None else local.group_size)
    if rollout.roles is not None:
        groups = itertools.batched(map(vars, local.episodes), local.group_size)
        said = [
            (prompt.text, prompt.ids, episodes)
            for prompt, episodes in zip(local.prompts, groups, strict=True)
        ]
        # As bytes: NumPy's texts have four for each character.
        arrays["conversations"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
        arrays |= {"roles": rollout.roles[sampled], "endings": rollout.endings}
    if local.owners is not None:
        ids = [np.array(prompt, np.int32) for prompt in local.own_prompts]
        arrays |= {
            "owners": local.owners,
            "own_lengths": np.array([len(one) for one in ids], int),
            "own_prompts": np.concatenate([np.zeros(0, np.int32), *ids]),
        }
    arrays |= {f"part/{name}": values for name, values in scores.parts.items()}
    return jax.tree.map(np.asarray, arrays)
