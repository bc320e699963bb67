"""The teacher of on-policy distillation: a frozen policy that scores the tokens of the samples.

It is another model, or the base of the run under another adapter, whose weights are those of the
policy and take no memory.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from qerl_jax.config.fields import TEACHER
from qerl_jax.data.prompts import Problem
from qerl_jax.errors import UserError
from qerl_jax.evaluation.load_policy import warn_of_another_base
from qerl_jax.memory.run_plan import PlannedTeacher
from qerl_jax.policy.config import ModelConfig
from qerl_jax.policy.policy import Policy
from qerl_jax.policy.trainable import current_policy
from qerl_jax.processes.group import Processes
from qerl_jax.run.folder import RunFolder
from qerl_jax.system.paths import user_path
from qerl_jax.training.first_policy import load_base, policy_digest
from qerl_jax.weights.checkpoint import open_checkpoint
from qerl_jax.weights.load import LoadedModel
from qerl_jax.weights.peft import CONFIG_FILE, load_peft_adapter, read_peft_config
from qerl_jax.weights.tokenizer import Tokenizer

FACT = "teacher_calibration"  # in config.json of a run: the digest of its teacher's base
_PADDING = re.compile(r"\[PAD\d+\]")  # GGUF files name the rows of padding so
_SHOWN = 3  # tokens that an error names


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher: its arrays, the digest of what they are, and what plans need to know."""

    policy: Policy
    digest: str
    planned: PlannedTeacher


def has_own_weights(config: ConfigDict) -> bool:
    """Whether the teacher of a run is another model than the base of the policy."""
    own, base = config.teacher, config.model
    return (own.source, own.format) != (base.source, base.format) and own.source != ""


def plan_teacher(
    config: ConfigDict, model: ModelConfig, read: Callable[[str], ModelConfig]
) -> PlannedTeacher | None:
    """Returns what the plan of a run needs to know of its teacher; None without one.

    Args:
        config: the resolved config.
        model: architecture of the policy.
        read: function from a source to its architecture.

    Raises:
        UserError: the adapter or the architecture cannot be read.
    """
    if not TEACHER.holds(config):
        return None
    adapter = None
    if config.teacher.adapter:
        adapter = read_peft_config(_adapter_folder(config))[0]
    if not has_own_weights(config):
        return PlannedTeacher(model, adapter)
    with teacher_errors(config):
        return PlannedTeacher(read(config.teacher.source), adapter, config.teacher.format)


@contextlib.contextmanager
def teacher_errors(config: ConfigDict) -> Generator[None]:
    """Names the teacher in an error that says nothing of whose model or adapter it is."""
    field = "source" if config.teacher.source else "adapter"
    try:
        yield
    except UserError as error:
        raise UserError(f"teacher.{field}={config.teacher[field]}: {error}") from error


def load_teacher_model(
    config: ConfigDict,
    problems: Mapping[str, list[Problem]],
    *,
    mesh: Mesh | None,
    processes: Processes,
    folder: RunFolder | None,
) -> LoadedModel | None:
    """Loads the model of a teacher, calibrated as the policy is; None where it is the policy's.

    It is loaded before the policy, whose plan counts it. The arguments are those of `load_base`.

    Raises:
        UserError: as in `load_base`, or it has other tokens than the policy.
    """
    if not has_own_weights(config):
        return None
    source, form = config.teacher.source, config.teacher.format
    tokenizer = open_checkpoint(config.model.source).tokenizer
    with teacher_errors(config):
        checkpoint = open_checkpoint(source)
    if checkpoint.packed and checkpoint.packed_form != form:
        raise UserError(
            f"teacher.source={source} holds {checkpoint.packed_form.upper()} weights: pass "
            f"--config.teacher.format={checkpoint.packed_form}"
        )
    if tokenizer is not None and checkpoint.tokenizer is not None:
        check_tokens(config, tokenizer, checkpoint.tokenizer)
    own = config.copy_and_resolve_references()
    with own.unlocked():
        own.model.source, own.model.format = source, form
        own.teacher.source = own.teacher.adapter = own.init_from = ""
        # The plan of the rollout that writes the text of its calibration has an adapter.
        own.lora.update(targets=("q_proj",), expert_rank=0, init="")
        own.train.parameters = "lora"
    with teacher_errors(config):
        return load_base(
            own,
            problems,
            mesh=mesh,
            processes=processes,
            folder=folder,
            fact=FACT,
            tokenizer=tokenizer,
        )[0]


def make_teacher(config: ConfigDict, base: LoadedModel, own: LoadedModel | None) -> Teacher | None:
    """Returns the teacher of a run; None without one.

    Args:
        config: the resolved config.
        base: the model of the policy before training.
        own: the model of the teacher, or None where it is that of the policy.

    Raises:
        UserError: the adapter cannot be read or does not fit the model.
    """
    model = base if own is None else own
    planned = plan_teacher(config, model.config, lambda _: model.config)
    if planned is None:
        return None
    policy = Policy(model.params, None)
    if config.teacher.adapter:
        folder = _adapter_folder(config)
        lora_config, adapter_base = read_peft_config(folder)
        warn_of_another_base(folder, adapter_base, (config.teacher.source, model.source))
        with teacher_errors(config):
            adapter = load_peft_adapter(folder, model.config, lora_config)
        policy = Policy(current_policy(model.params, adapter), adapter.lora)
    facts = model.fingerprint, model.config.digest, policy_digest(policy), policy.lora is not None
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Teacher(policy, digest, planned)


def check_tokens(config: ConfigDict, tokenizer: Tokenizer, own: Tokenizer) -> None:
    """Refuses a teacher that gives an id to another token than the policy does.

    Ids beyond the shorter vocabulary are not compared, and neither are rows of padding.

    Raises:
        UserError: tokens differ; it names the first ones.
    """
    policy_tokens, own_tokens = _tokens(tokenizer), _tokens(own)
    shorter = min(max(policy_tokens), max(own_tokens)) + 1
    pairs = ((i, policy_tokens.get(i), own_tokens.get(i)) for i in range(shorter))
    differing = [(i, mine, other) for i, mine, other in pairs if mine != other]
    if differing:
        named = ", ".join(f"{i} is {mine!r} and {other!r}" for i, mine, other in differing[:_SHOWN])
        raise UserError(
            f"teacher.source={config.teacher.source} has other tokens than model.source="
            f"{config.model.source}: {len(differing)} of {shorter} ids differ, {named}; take a "
            "teacher with the tokenizer of the policy"
        )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens by id, special ones included and padding left out."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    return {i: token for token, i in vocabulary.items() if not _PADDING.fullmatch(token)}


def _adapter_folder(config: ConfigDict) -> Path:
    """The folder of the teacher's adapter: the best or last one of a run, or a PEFT adapter."""
    source = config.teacher.adapter
    path = user_path(source)
    run = RunFolder(path)
    folders = run.adapter(best=True), run.adapter(), path
    folder = next((one for one in folders if (one / CONFIG_FILE).exists()), None)
    if folder is None:
        raise UserError(
            f"teacher.adapter={source}: neither a run with an adapter nor the folder of a PEFT "
            "adapter; a whole model is a teacher.source"
        )
    return folder
