"""Samples completions from the policy that is being trained, out of the same arrays.

A prompt is prefilled once, and its keys and values are copied for its group. The rows decode
together in jitted chunks of a fixed number of steps. Between two chunks the host gives the slots of
rows that have ended to rows that wait; when no row waits, the batch is compacted as rows end. The
host reads the samples of a chunk while the device computes the next one, so that the device does
not wait for the host.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence

import jax
import numpy as np

from qerl_jax.compile.aot import compile_operations
from qerl_jax.compile.operation import Executables, Operation, Programs, commit
from qerl_jax.errors import UserError
from qerl_jax.policy import sharding
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.dequantize import dequantized
from qerl_jax.policy.layers import kinds
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.quant import EVERY, rounds_to_fp8
from qerl_jax.rollout import programs
from qerl_jax.rollout.completions import Completions, Rollout
from qerl_jax.rollout.config import (
    DEFAULT_ENGINE,
    EngineConfig,
    SamplingConfig,
    Tokenizer,
    TurnConfig,
    check_fields,
)
from qerl_jax.rollout.decode import DecodeConfig, decode_config
from qerl_jax.rollout.programs import RolloutPrograms
from qerl_jax.rollout.progress import RolloutProgress, combine
from qerl_jax.rollout.replicas import deal, in_threads, largest_share, rows_of
from qerl_jax.rollout.row import Row
from qerl_jax.rollout.scheduler import Scheduler
from qerl_jax.rollout.shapes import RolloutShapes, plan_shapes
from qerl_jax.rollout.turns import (
    Agents,
    Conversations,
    Dialog,
    OneTurn,
    Requests,
    Sessions,
    TurnPolicy,
)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Everything about rollouts but the policy, the prompts and the randomness; made once.

    `dataclasses.replace` makes a sampler with other settings.
    """

    model_config: ModelConfig  # the architecture of the whole policy
    # Token ids that end a completion and that follow it; text for stop strings.
    tokenizer: Tokenizer
    sampling: SamplingConfig  # distribution and length of the completions
    # Settings of the engine; its bounds of rows and memory are those of one device.
    engine: EngineConfig = DEFAULT_ENGINE
    group_size: int = 1  # G, number of completions of each prompt
    # Programs for policies of the shapes on the devices for which `compiled` made them. With None,
    # jit compiles each program when it is first used.
    executables: Executables | None = None
    # Limits of conversations with environments; None for completions of one turn.
    turns: TurnConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self, group_size=(self.group_size >= 1, "at least 1"))

    def at_temperature(self, temperature: float) -> "Sampler":
        """Returns the sampler with another temperature, for which it has the same programs."""
        sampling = dataclasses.replace(self.sampling, temperature=temperature)
        return dataclasses.replace(self, sampling=sampling)

    def greedy(self) -> "Sampler":
        """Returns the sampler with greedy decoding and the same limits."""
        sampling = dataclasses.replace(
            self.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0
        )
        return dataclasses.replace(self, sampling=sampling)

    def rollout(
        self,
        key: jax.Array,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        ids: Sequence[int] | None = None,
        dialog: Dialog | Agents | None = None,
    ) -> Rollout:
        """Returns the whole rollout of `steps`, as NumPy arrays."""
        steps = self.steps(key, policy, prompts, ids=ids, dialog=dialog)
        (last,) = collections.deque(steps, maxlen=1)
        return last.rollout

    def steps(
        self,
        key: jax.Array,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        ids: Sequence[int] | None = None,
        dialog: Dialog | Agents | None = None,
    ) -> Generator[RolloutProgress, None, Rollout]:
        """Samples G completions of every prompt, and yields the progress after every chunk.

        All devices of this process that hold the policy sample; the progress is that of all of
        them. The last progress has the whole rollout, which is also what the generator returns. A
        caller that stops early closes the generator, or drops it: until then the devices sample.

        Args:
            key: PRNG key; a sample depends on it, on the row and on the position only.
            policy: the policy, on one device or on a mesh.
            prompts: P lists of token ids.
            ids: identity [P] of each prompt, which the samples of its rows depend on; by default
                its index. Pass them when sampling a part of the prompts.
            dialog: the environments of the rows, or where `turns` have sessions the agents, whose
                requests bring the prompts; needed if the sampler has `turns`. The rows of agents
                are those of one group of devices after the other.

        Raises:
            UserError: there is no prompt, a prompt is empty or too long, does not begin as the
                others or has a token id that the model does not have, the key is not threefry, or
                the memory does not hold a row.
            MissingProgramError: a program is missing from the executables.
        """
        if "threefry" not in (kind := str(jax.random.key_impl(key))):
            raise UserError(
                f"a key of {kind}: its numbers depend on the batch; pass "
                "jax.random.key(seed, impl='threefry2x32')"
            )
        groups = sharding.groups_of(policy.params)
        shares = deal([len(prompt) for prompt in prompts], len(groups))
        has_sessions = self.turns is not None and self.turns.sessions
        identities = np.arange(len(prompts)) if ids is None else np.asarray(ids)
        longest = max(map(len, prompts)) if has_sessions and len(prompts) else 0
        samplers = self._group_samplers(
            len(groups), largest_share(len(prompts), len(groups)), longest
        )
        rows = [rows_of(share, self.group_size) for share in shares]
        dialogs: list[Dialog | Agents | Requests | None] = [dialog] * len(groups)
        if dialog is not None and (has_sessions or len(groups) > 1):
            dialogs = [dialog.part(own_rows.tolist()) for own_rows in rows]
        turns = [self._turn_policy(part) for part in dialogs]

        def steps_on(number: int) -> Generator[RolloutProgress, None, Rollout]:
            own_key, own_policy = sharding.take_group((key, policy), groups[number])
            own_prompts = [prompts[i] for i in shares[number]]
            return samplers[number]._steps_on_group(
                own_key, own_policy, own_prompts, identities[shares[number]], turns[number]
            )

        if len(groups) == 1:
            return (yield from steps_on(0))
        size = len(prompts) * self.group_size
        whole = self._completions(size)
        busy = [number for number, share in enumerate(shares) if len(share)] or [0]
        latest: dict[int, RolloutProgress] = {}
        steps = in_threads([lambda number=number: steps_on(number) for number in busy])
        with contextlib.closing(steps):
            for part, step in steps:
                latest[part] = step
                if has_sessions:  # Their number of rows is known in the end.
                    yield combine(latest.values(), _ended(latest.values()), step.rollout)
                    continue
                targets = jax.tree.leaves((whole.ended, whole.rollout))
                sources = jax.tree.leaves((step.ended, step.rollout))
                for array, values in zip(targets, sources, strict=True):
                    array[rows[busy[part]]] = values
                yield combine(latest.values(), whole.ended.copy(), whole.rollout)
        if not has_sessions:
            return whole.rollout
        parts = [latest[part] for part in range(len(busy))]
        rollout = jax.tree.map(lambda *x: np.concatenate(x), *(part.rollout for part in parts))
        yield combine(parts, _ended(parts), rollout)
        return rollout

    def operations(self, key: jax.Array, policy: Policy, *, num_prompts: int) -> list[Operation]:
        """Returns every operation that a rollout on one group of devices can need.

        Args:
            key: PRNG key like those of the rollouts.
            policy: the policy as the group holds it.
            num_prompts: number of prompts of the group; `engine.prompt_width` must be the longest.

        Raises:
            UserError: as in `steps`.
        """
        key, policy = commit((sharding.replicate_like(key, policy.params), policy))
        shapes, config = self._plan(policy, num_prompts, self.engine.prompt_width)
        return list(programs.operations(key, policy, shapes, config).values())

    def compiled(
        self,
        key: jax.Array,
        policy: Policy,
        *,
        num_prompts: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> "Sampler":
        """Compiles all programs of rollouts, or loads them from the cache.

        Args:
            key: PRNG key like those of the rollouts.
            policy: a policy of the shapes and on the devices of those that will sample.
            num_prompts: number of prompts of the largest rollout on all devices.
            on_progress: called with the number of programs that are ready and the number of all.

        Returns:
            The sampler with its executables.

        Raises:
            UserError: as in `steps`.
        """
        groups = sharding.groups_of(policy.params)
        key, policy = sharding.take_group((key, policy), groups[0])
        key, policy = commit((sharding.replicate_like(key, policy.params), policy))
        operations = self.operations(
            key, policy, num_prompts=largest_share(num_prompts, len(groups))
        )
        executables = compile_operations((key, *policy), operations, on_progress, others=groups[1:])
        return dataclasses.replace(self, executables=executables)

    def _group_samplers(self, num_groups: int, num_prompts: int, longest: int) -> list["Sampler"]:
        """Returns the samplers of groups of devices, each of which takes at most `num_prompts`.

        All of them have the shapes of the largest share, so that they have the same programs, and
        take prompts of `longest` tokens.
        """
        engine = dataclasses.replace(
            self.engine,
            num_prompts=max(self.engine.num_prompts, num_prompts),
            prompt_width=max(self.engine.prompt_width, longest),
        )
        executables: list[Executables | None] = [None] * num_groups
        if self.executables is not None:
            executables = [self.executables, *self.executables.replicas]
        return [
            dataclasses.replace(self, engine=engine, executables=replica) for replica in executables
        ]

    def _plan(
        self, policy: Policy, num_prompts: int, longest: int
    ) -> tuple[RolloutShapes, DecodeConfig]:
        """Returns the shapes of a rollout on one group of devices, and its static arguments."""
        model_config = sharding.shard_config(self.model_config, policy.params)
        shapes = plan_shapes(
            policy.params,
            num_prompts=num_prompts,
            longest=longest,
            group_size=self.group_size,
            model_config=model_config,
            sampling=self.sampling,
            engine=self.engine,
            turns=self.turns,
        )
        arguments = model_config, self.sampling, self.engine, self.tokenizer, self.turns
        return shapes, decode_config(*arguments)

    def _completions(self, rows: int, *, width: int | None = None) -> Completions:
        """Returns completions without a token."""
        model = self.model_config
        routed = model if self.engine.records_routes and model.experts else None
        arguments = rows, self.sampling, self.tokenizer, self.turns
        return Completions(*arguments, routed=routed, width=width)

    def _turn_policy(self, dialog: Dialog | Agents | Requests | None) -> TurnPolicy:
        """Returns what rows do after a turn."""
        limit = self.sampling.max_new_tokens
        if self.turns is None:
            return OneTurn(limit)
        if dialog is None:
            raise UserError("the sampler has turns: pass the environments of the rows as dialog")
        if self.turns.sessions:
            rewinds = all(mixer.REWINDS for mixer in kinds.mixers_of(self.model_config))
            first_turn = None if rewinds else self.turns.next_turn(0, 0, limit)
            # pyrefly: ignore[bad-argument-type]
            return Sessions(dialog, self.turns, first_turn=first_turn)
        return Conversations(dialog, self.turns, limit)  # pyrefly: ignore[bad-argument-type]

    def _steps_on_group(
        self,
        key: jax.Array,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        ids: np.ndarray,
        turns: TurnPolicy,
    ) -> Generator[RolloutProgress, None, Rollout]:
        """Samples as `steps` does, on one group of devices that hold the policy together."""
        longest = _longest(prompts, self.engine, self.model_config.vocab_size)
        shapes, config = self._plan(policy, len(prompts), longest)
        key, policy = commit((sharding.replicate_like(key, policy.params), policy))
        table = Programs(programs.operations(key, policy, shapes, config), self.executables)
        rows_read = EVERY if rounds_to_fp8(config.dequantize) else shapes.batch_sizes[0]
        dense = dequantized(policy.params, table, rows=rows_read)
        size = self.group_size
        identities = rows_of(ids, size).astype(np.int32).tolist()
        if isinstance(turns, Sessions):  # Requests bring the prompts.
            completions = self._completions(0, width=turns.begin(identities, longest))
            rows = list[Row]()
        else:
            completions = self._completions(len(identities))
            rows = [
                Row(number, identity, number // size, prompts[number // size])
                for number, identity in enumerate(identities)
            ]
        scheduler = Scheduler(
            key,
            policy._replace(params=dense),
            rows,
            turns=turns,
            programs=RolloutPrograms(shapes, config, table),
            completions=completions,
        )
        try:
            while not scheduler.has_ended:
                # 1. Rows that come next get slots, and the first tokens of their turns.
                scheduler.admit()
                older = len(scheduler.in_flight)
                if decoding := scheduler.decoding():
                    # 2. Compact the batch, once no row waits.
                    scheduler.compact(decoding)
                    # 3. Decode a chunk.
                    scheduler.decode_chunk(decoding)
                # 4. Drain the samples that were in flight before, while the device decodes.
                scheduler.drain(older)
                yield scheduler.progress
            if isinstance(turns, Sessions):  # A session may have ended since.
                completions.cut(turns.count)
                yield scheduler.progress
        finally:
            scheduler.close()
        return scheduler.progress.rollout


def _ended(parts: Iterable[RolloutProgress]) -> np.ndarray:
    return np.concatenate([part.ended for part in parts])


def _longest(prompts: Sequence[Sequence[int]], engine: EngineConfig, vocab_size: int) -> int:
    if not len(prompts):
        raise UserError("there is no prompt to complete: pass at least one")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {number} is empty: it needs at least one token")
        # The embedding would read another token in its place.
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise UserError(
                f"prompt {number} has token ids from {min(prompt)} to {max(prompt)}, the model has "
                f"those from 0 to {vocab_size - 1}: encode it with the tokenizer of the model"
            )
    if engine.shared_tokens > (shared := shared_tokens(prompts)):
        raise UserError(
            f"shared_tokens={engine.shared_tokens}: only {shared} tokens are the same in all "
            "prompts, with one more in each; pass 0 to compute each as a whole"
        )
    return max(engine.prompt_width, *map(len, prompts))


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Returns how many tokens all prompts begin with, at least one less than each prompt has."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
