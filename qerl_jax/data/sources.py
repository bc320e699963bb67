"""Where problems come from: local files, datasets on the Hugging Face hub, and generators."""

import ast
import contextlib
import dataclasses
import functools
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from qerl_jax.config.fields import OWN_TASKS, REASONING_GYM
from qerl_jax.data.prompts import Problem
from qerl_jax.data.sums import sums
from qerl_jax.errors import UserError, check_unicode, first_line, visible
from qerl_jax.rewards.answers import answer_part, last_boxed
from qerl_jax.rewards.calls import plain
from qerl_jax.rewards.functions import Reward, math_answer, number_only_format
from qerl_jax.rewards.references import COMPARING, can_read, is_prose, needs_answer
from qerl_jax.system import hub
from qerl_jax.system.jsonl import read_jsonl
from qerl_jax.system.live_line import waiting
from qerl_jax.system.paths import user_path
from qerl_jax.system.safe_files import check_readable, read_bytes

QUESTION_FIELDS = ("question", "problem", "prompt")
_ANSWER_FIELDS = ("answer", "solution")
_ROLES = ("system", "user", "assistant")
ABSENT = object()  # in place of a field that a row lacks
_HUB_CONFIGURATIONS = {"openai/gsm8k": "main"}  # for datasets without a default on the hub


class LeftOutError(Exception):
    """The reason why a row is left out, as in 'left out 2 problems with REASON', and a remedy."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which problems of a source are kept."""

    # Functions that score completions of the problems. A problem is left out if one of them needs
    # its answer and cannot read it. None stands for `math_answer`.
    rewards: Sequence[Reward] | None = None
    # Difficulties to keep, compared with the field `level`; an empty set keeps all.
    levels: frozenset[int] = frozenset()
    max_question_chars: int = 0  # largest length of a question; 0 means no limit
    # Names of the fields `question`, `answer` and `level` in the rows. A name with dots is one of a
    # nested object, such as `reward_model.ground_truth`. A field that is absent or '' has one of
    # the usual names.
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Counts of the rows that were left out, by reason and remedy.
    left_out: Counter[tuple[str, str]] = dataclasses.field(
        default_factory=Counter, compare=False, repr=False
    )
    # Whether a process may be appending to the file, whose last line then may be incomplete.
    appended: ClassVar[bool] = False

    @functools.cached_property
    def scorers(self) -> list[Reward]:
        """The rewards that need an answer."""
        if self.rewards is None:
            return [math_answer]
        return [reward for reward in self.rewards if needs_answer(reward)]

    def read(self, row: Mapping[str, Any], where: str) -> Problem:
        """Reads a row of a file or of a dataset.

        Raises:
            UserError: the row is malformed.
            LeftOutError: the problem is not kept.
        """
        name, value = self.read_field(row, "question", QUESTION_FIELDS, where)
        chat = isinstance(value, list | tuple)
        messages = _messages(value, f"{where}: {name}") if chat else ()
        question = as_text(messages) if chat else text_of(value, f"{where}: {name}")
        if len(messages) == 1:
            messages = ()
        if not question.strip():
            raise UserError(f"{where}: the question is empty")
        if not messages and is_written_chat(question):
            raise UserError(
                f"{where}: {name} is a text with a list of chat messages in it, {question!r:.60}: "
                "write the list itself into the file, as json.loads or ast.literal_eval returns it"
            )
        needed = bool(self.scorers)
        name, value = self.read_field(row, "answer", _ANSWER_FIELDS, where, optional=not needed)
        # Rewards that need no answer may still get the column, whatever it holds.
        is_text = isinstance(value, str) or _number_text(value) is not None
        answer = text_of(value, f"{where}: {name}") if needed or is_text else ""
        self.check_level(row, where)
        answer = _short_answer(answer, name == "solution", needed)
        return self.keep(Problem(question, answer, messages, row))

    def question_of(self, row: Mapping[str, Any]) -> str | None:
        """The question of a row that may lack an answer; None without one."""
        name = self.fields.get("question")
        values = (column(row, name) for name in ([name] if name else QUESTION_FIELDS))
        value = next((value for value in values if value is not None), None)
        if isinstance(value, list | tuple):
            value = as_text(_messages(value, "the test split"))
        return value if isinstance(value, str) else _number_text(value)

    def asked_in(self, evaluation: Sequence[Problem], problems: Sequence[Problem]) -> set[str]:
        """The questions of an evaluation as those of `problems`, which this selection read."""
        return {problem.question for problem in evaluation}

    def keep(self, problem: Problem) -> Problem:
        """Returns a problem that is kept; raises a LeftOutError for any other."""
        if 0 < self.max_question_chars < len(problem.question):
            raise LeftOutError(
                f"a question over {self.max_question_chars} characters",
                "raise data.max_question_chars",
            )
        if not problem.answer and self.scorers:
            raise LeftOutError(
                "an empty answer",
                "fill them in, or name their column as data.fields.answer; "
                f"{self._readers()} reads them",
            )
        for scorer in self.scorers:
            if not can_read(scorer, problem.answer):
                raise LeftOutError(
                    f"an answer that {plain(scorer).__name__} cannot read",
                    "take a reward that reads them, such as exact_answer",
                )
        return problem

    def read_field(
        self,
        row: Mapping[str, Any],
        field: str,
        usual_names: Sequence[str],
        where: str,
        *,
        optional: bool = False,
    ) -> tuple[str, Any]:
        """Returns name and value of a field; ('', '') if it is optional and absent.

        A table has a null in the columns of other rows, so that one with a value comes first.
        """
        field_name = self.fields.get(field)
        names = [field_name] if field_name else usual_names
        values = {name: column(row, name, ABSENT) for name in names}
        found = [name for name in names if values[name] is not ABSENT]
        if found:
            name = min(found, key=lambda name: is_missing(values[name]))
            return name, values[name]
        if optional and not field_name:
            return "", ""
        expected = f"{field_name} (data.fields.{field})" if field_name else " or ".join(usual_names)
        reads = ""
        if field == "answer" and self.scorers:
            reads = f", which {self._readers()} reads, or pass a reward that reads none"
        raise UserError(
            f"{where}: no field {expected}; it has {', '.join(row) or 'none'}"
            + ("" if field_name else f": name it, --config.data.fields.{field}=NAME{reads}")
        )

    def _readers(self) -> str:
        """The rewards that read answers."""
        functions = [plain(scorer) for scorer in self.scorers]
        return "the reward " + " or ".join(getattr(f, "__name__", repr(f)) for f in functions)

    def check_level(self, row: Mapping[str, Any], where: str) -> None:
        """Raises a LeftOutError for a row of another level."""
        if not self.levels:
            return
        name = self.fields.get("level") or "level"
        level = column(row, name, ABSENT)
        choose = "choose other levels, or data.levels=() for all"
        # Two training problems of MATH have no level: 'Level ?', or null where it became a number.
        if level in ("?", "Level ?") or is_missing(level):
            raise LeftOutError("no known level", choose)
        text = level if isinstance(level, str) else _number_text(level)
        match = re.fullmatch(r"(?:Level )?([0-9]+)(?:\.0*)?", text or "")
        if match is None:
            raise UserError(
                f"{where}: data.levels={sorted(self.levels)}, but the level of this problem is "
                f"{None if level is ABSENT else level!r}: a number or 'Level NUMBER' is needed"
            )
        if int(match[1]) not in self.levels:
            raise LeftOutError(
                f"a level other than {', '.join(map(str, sorted(self.levels)))}", choose
            )


def _short_answer(text: str, solution: bool, needed: bool) -> str:
    r"""Returns the short answer of a row.

    An answer whose last line is `#### NUMBER`, the form of GSM8K, is that number. A solution is
    otherwise the content of the last box that follows its reasoning. Any other text is the answer
    as it stands. If the answer is not needed, a solution may lack it.
    """
    text = text.strip()
    last_line = text.rpartition("\n")[2].strip()
    number = last_line.removeprefix("####").strip()
    if last_line != number and number_only_format("", number, "", 0, True):
        return number.replace(",", "")
    if not solution:
        return text
    text = answer_part("", text)
    boxed = last_boxed(text)
    if boxed is None and needed and is_prose(text):
        raise LeftOutError(
            r"a solution that marks no answer by \boxed{} or a last line '#### NUMBER'",
            "mark them, or name a column of short answers as data.fields.answer",
        )
    return (text if boxed is None else boxed).strip()


def column(row: Mapping[str, Any], name: str, absent: Any = None) -> Any:
    """Returns a column of a row, or of an object in it: `a.b` is row['a']['b']; else `absent`."""
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    nested = row.get(outer)
    return column(nested, inner, absent) if dot and isinstance(nested, Mapping) else absent


def text_of(value: Any, where: str) -> str:
    """Returns the text of a field: a text, or a number without what a table has added to it.

    A table that lacks values has floats in place of whole numbers: 72.0 is '72'. `where` names the
    field in messages.

    Raises:
        UserError: it is neither a text of valid Unicode nor a finite number.
    """
    text = value if isinstance(value, str) else _number_text(value)
    if text is None:
        raise UserError(
            f"{where} must be a string, not {value!r:.50}: write a string or a finite number"
        )
    check_unicode(text, where)
    return text


def _number_text(value: Any) -> str | None:
    """All digits of a finite number, a whole one without a point; None for any other value."""
    if isinstance(value, bool) or not isinstance(
        value, int | float | Decimal | np.integer | np.floating
    ):
        return None
    number = Decimal(str(value))  # of a float, the digits that tell it from all others
    if not number.is_finite():
        return None
    text = f"{number if number else abs(number):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def is_missing(value: Any) -> bool:
    """Whether a table has no value in a field: null, or NaN in a column of numbers."""
    return value is None or (isinstance(value, float | Decimal | np.floating) and value != value)


_OBJECTS = re.compile(
    r"""(?:array\()?\[\s*(?:\{(?:[^'"{}\[\]]|"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')*+\}[\s,]*+)++\]"""
    r"""(?:,\s*dtype=object\))?""",
    re.DOTALL,
)
_KEYS_OF_MESSAGES = ({"role", "content"}, {"from", "value"})


def is_written_chat(text: str) -> bool:
    """Whether a text is a list of chat messages as JSON, Python or NumPy writes it, alone."""
    text = text.strip()
    if not text.startswith(tuple("[({\"'a")) or not any(
        all(key in text for key in keys) for keys in _KEYS_OF_MESSAGES
    ):
        return False
    value: Any = None
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = value or read(text)
    if value is None:
        return _OBJECTS.fullmatch(text) is not None
    if isinstance(value, str):
        return value != text and is_written_chat(value)
    if isinstance(value, Mapping):
        value = value.get("messages", [value])
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and any(keys <= message.keys() for keys in _KEYS_OF_MESSAGES)
            for message in value
        )
    )


def _messages(value: Sequence[Any], where: str) -> tuple[tuple[str, str], ...]:
    """Reads chat messages, dicts with 'role' and 'content', of which a user's is the last."""
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise UserError(
                f"{where}: message {number} is {message!r:.50}: an object with a content and a "
                f"role of {', '.join(_ROLES)} is needed"
            )
        content = text_of(message.get("content"), f"{where}: the content of message {number}")
        messages.append((message["role"], content))
    if not messages or messages[-1][0] != "user":
        raise UserError(
            f"{where}: the last message must be the user's, which the policy answers: leave out "
            "the messages after it"
        )
    return tuple(messages)


def as_text(messages: Sequence[tuple[str, str]]) -> str:
    """The question of a chat: its only message, or all messages with their roles."""
    if len(messages) == 1:
        return messages[0][1]
    return "\n".join(f"{role}: {content}" for role, content in messages)


def _select(rows: Iterable[tuple[str, Mapping[str, Any]]], selection: Selection) -> list[Problem]:
    """Reads pairs of an origin, for messages, and a row; prints how many are left out, and why."""
    problems: list[Problem] = []
    left_out: dict[tuple[str, str], list[str]] = {}  # reason and remedy -> origins
    for where, row in rows:
        try:
            problems.append(selection.read(row, where))
        except LeftOutError as error:
            left_out.setdefault((error.reason, error.remedy), []).append(where)
    for cause, origins in left_out.items():
        selection.left_out[cause] += len(origins)
        print_left_out(len(origins), f"with {cause[0]}; the first: {origins[0]}")
    return problems


def print_left_out(count: int, what: str) -> None:
    """Prints how many problems are left out."""
    print(visible(f"left out {count} problem{'s' * (count != 1)} {what}"), flush=True)


# --- Local files ----------------------------------------------------------------------------------

FILE_TYPES = (".jsonl", ".json", ".parquet")
# Limits on the bytes of a table in memory: a number, and one for each byte of its file.
_LARGEST_TABLE, _UNPACKED = 1 << 30, 100
_PARQUET_ROWS = 128  # that are read at a time
_PART = re.compile(r"-[0-9]+(-of-[0-9]+)?(-[0-9a-f]{16})?$")  # with a digest in older datasets


def read_problems(path: str, selection: Selection, *, split: str = "train") -> list[Problem]:
    """Reads the problems of a local file or folder.

    A file has JSON lines, or is `.json` with one array or with lines, or `.parquet`; the files of a
    folder are read in the order of their names. Where a name begins with `train` or `test`, or is
    that of the split, as in the folders of datasets on the hub, only the files of the split are
    read: `train.jsonl`, or its parts `train-00000-of-00002.jsonl` or `train-0.jsonl`.
    `train_1M.jsonl` is another split.

    Raises:
        UserError: a file cannot be read, there are no problems, or a row is malformed.
    """
    location = user_path(path)
    rows = [
        (f"{file if location.is_dir() else path}:{number}", row)
        for file in (_files(location, split) if location.is_dir() else [location])
        for number, row in _file_rows(
            file, str(file) if location.is_dir() else path, appended=selection.appended
        )
    ]
    if not rows:
        raise UserError(f"{path}: no problems: the file is empty")
    return _select(rows, selection)


def _files(folder: Path, split: str) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix in FILE_TYPES)
    of_split = [file for file in files if _PART.sub("", file.stem) == split]
    if of_split or any(file.name.startswith(("train", "test")) for file in files):
        files = of_split
    if not files:
        listing = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10])
        raise UserError(
            f"{folder}: no file of problems for {split} ({', '.join(FILE_TYPES)}, named {split} or "
            f"{split}-00000-of-00001); the folder has {listing or 'no files'}"
        )
    return files


def _file_rows(
    file: Path, name: str, *, appended: bool = False
) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """The numbered rows of a file; `name` is its name in messages, `appended` as in `Selection`."""
    try:
        if file.suffix == ".parquet":
            check_readable(file)
            return enumerate(_parquet_rows(file, name), 1)
        content = read_bytes(file)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"{name}: cannot read the problems: {reason}") from error
    if file.suffix == ".json" and content.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
        entries = enumerate(_json(content, name), 1)
    elif appended:
        entries = enumerate(read_jsonl(file), 1)
    else:
        lines = enumerate(content.splitlines(), 1)
        entries = [(i, _json(line, f"{name}:{i}")) for i, line in lines if line.strip()]
    rows = list(entries)
    for number, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{name}:{number}: a JSON object is needed, not {type(row).__name__}")
    return rows


def _json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: not a JSON object in UTF-8: {error}; problems are one object on a line, an "
            "array in a file .json, or a file .parquet"
        ) from error


def _parquet_rows(file: Path, name: str) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    size, read, rows = file.stat().st_size, 0, []
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if (count := table.metadata.num_rows) > size:
                raise UserError(f"{name}: its header names {count} rows in {size} bytes")
            for batch in table.iter_batches(_PARQUET_ROWS):
                # A text that many rows share is stored once, and takes memory in each of them.
                for values in batch.columns:
                    is_shared = isinstance(values, pyarrow.DictionaryArray)
                    read += (values.dictionary_decode() if is_shared else values).nbytes
                if read > _LARGEST_TABLE + _UNPACKED * size:
                    raise UserError(f"{name}: its {size} bytes unpack to more than {read}")
                rows += pyarrow.RecordBatch.from_arrays(
                    list(map(_shortest, batch.columns)), names=batch.schema.names
                ).to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise UserError(f"{name}: not a parquet file: {first_line(error)}") from error
    return rows


def _shortest(values: Any) -> Any:
    """A column whose numbers of 16 or 32 bits have the fewest digits that tell them: 0.1."""
    import pyarrow

    if values.type not in (pyarrow.float16(), pyarrow.float32()):
        return values
    numbers = values.to_numpy(zero_copy_only=False)
    missing = values.is_null().to_numpy(zero_copy_only=False)
    return pyarrow.array([float(str(n)) for n in numbers], pyarrow.float64(), mask=missing)


# --- Generated problems ---------------------------------------------------------------------------

# Tasks with a scorer of their own that accepts one answer, up to its spelling.
_ONE_ANSWER = (
    "ab", "calendar_arithmetic", "chain_sum", "circuit_logic", "color_cube_rotation",
    "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships", "figlet_font",
    "gsm_symbolic", "letter_jumble", "needle_haystack", "products",
    "rectangle_count", "self_reference", "sentence_reordering", "spell_backward",
    "string_insertion", "tsumego", "zebra_puzzles",
)  # fmt: skip


def _tasks() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of packages that reasoning_gym imports
        from reasoning_gym.factory import DATASETS

    return DATASETS


def generate_problems(
    source: str, options: Mapping[str, Any], *, seed: int, size: int, rewards: Sequence[Reward] = ()
) -> list[Problem]:
    """Returns up to `size` problems with different questions, in the order of their generation.

    Raises:
        UserError: the task does not exist, refuses the options, has no single answers, or is not
            one for the rewards, see `check_generated`.
    """
    if source.startswith(OWN_TASKS):
        rows = _own_rows(source, options, seed)[:size]
        return [Problem(row["question"], row["answer"], columns=row) for row in rows]
    tasks, task = _tasks(), source.removeprefix(REASONING_GYM)
    if task not in tasks:
        raise UserError(f"{source}: no such task; there are {', '.join(sorted(tasks))}")
    check_generated(source, rewards)  # before anything is generated
    import reasoning_gym

    fields = {field.name for field in dataclasses.fields(tasks[task][1])} - {"seed", "size"}
    for name in options:
        if name not in fields:
            raise UserError(
                f"{source}: no option {name!r}; it has {', '.join(sorted(fields))}: pass them as "
                "data.options, or --config.data.options={} for none"
            )
    draws = 4 * size  # enough to draw nearly every question of a task that has few
    try:
        entries = reasoning_gym.create_dataset(task, **options, seed=seed, size=draws)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{source}: options {dict(options)}: {error}") from error
    problems: dict[str, Problem] = {}
    with waiting(f"{source}: generating problems") as say:  # minutes for tasks like countdown
        for index in range(draws):
            entry = entries[index]
            question, answer = entry["question"], entry["answer"]
            if not isinstance(answer, str):
                raise UserError(f"{source}: its problems have no single answer to compare with")
            problems.setdefault(question, Problem(question, answer, columns=entry))
            say(f"{source}: generated {len(problems)} of {size} problems")
            if len(problems) == size:
                break
    check_generated(source, rewards, problems.values())
    return list(problems.values())


def _own_rows(source: str, options: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
    """The rows of the project's own task."""
    if source != f"{OWN_TASKS}{sums.__name__}":
        raise UserError(f"{source}: no such task; there is {OWN_TASKS}{sums.__name__}")
    for name in options:
        if name != "largest":
            raise UserError(f"{source}: no option {name!r}; it has largest: pass data.options={{}}")
    return sums(seed=seed, **options)


def check_generated(
    source: str, rewards: Sequence[Reward], problems: Iterable[Problem] = ()
) -> None:
    """Refuses built-in rewards that judge a generated task otherwise than its own scorer.

    Where a task has several right answers its own scorer knows all of them, and a reward that
    compares with one does not. Most tasks have a scorer of their own, also where only its partial
    credit or its tolerance to spelling is its own; these are in `_ONE_ANSWER`. The letters of a
    text may not be exchanged, as the factors of a formula may.

    Args:
        source: source of generated problems, or any other one.
        rewards: functions that score completions of the problems.
        problems: problems of the source.

    Raises:
        UserError: a reward does not fit the task.
    """
    reward = next((plain(reward) for reward in rewards if plain(reward) in COMPARING), None)
    task = source.removeprefix(REASONING_GYM)
    if reward is None or task == source:
        return
    from reasoning_gym.dataset import ProceduralDataset

    if (
        task not in _ONE_ANSWER
        and _tasks()[task][0].score_answer is not ProceduralDataset.score_answer
    ):
        raise UserError(
            f"{source}: its scorer accepts several answers, of which {reward.__name__} knows one: "
            "name a reward that calls reasoning_gym.get_score_answer_fn, as in docs/data.md"
        )
    texts = [p.answer for p in problems if not number_only_format("", p.answer, "", 0, True)]
    if texts and math_answer in map(plain, rewards):
        raise UserError(
            f"{source}: its answers are texts, the first {texts[0]!r:.40}, which math_answer reads "
            "as formulas, where 'tac' equals 'cat': use exact_answer"
        )


# --- The hub --------------------------------------------------------------------------------------


def load_hub_splits(source: str, local_field: str, *needed: str) -> Any:
    """Loads the splits of a dataset on the hub, by name.

    The source is `owner/name` or `owner/name:configuration`. The error names `local_field`, which
    takes a local file instead, and `needed` are the splits that the dataset must have.

    Raises:
        UserError: the dataset cannot be loaded, or lacks a split.
    """
    import datasets

    name, _, configuration = source.partition(":")
    if user_path(name).exists():
        name = str(user_path(name))
        request: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    elif mistake := hub.local_mistake(name):
        raise UserError(
            f"{source}: {mistake}; pass a file as --config.{local_field}=FILE.jsonl, or the hub id "
            "of a dataset"
        )
    else:
        request = hub.asking(name)
    try:
        with request:
            splits = datasets.load_dataset(name, configuration or _HUB_CONFIGURATIONS.get(name))
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UserError(
            f"{source}: cannot load it from the Hugging Face hub ({reason}); pass a "
            f"local copy of the same fields, --config.{local_field}=FILE.jsonl, or train on "
            "generated problems, --config.data.source=reasoning_gym:gsm_symbolic"
        ) from error
    for split in needed:
        if split not in splits:
            raise UserError(f"{source}: no split {split!r}; it has {', '.join(map(str, splits))}")
    return splits


def read_rows(rows: Iterable[Any], where: str, selection: Selection) -> list[Problem]:
    """Reads the rows of a split of a dataset, or those of generated problems."""
    return _select(((f"{where}:{number}", row) for number, row in enumerate(rows, 1)), selection)


def questions_of(rows: Iterable[Mapping[str, Any]], selection: Selection) -> set[str]:
    """Returns the questions of a split whose rows may lack answers."""
    return {text for row in rows if (text := selection.question_of(row)) is not None}
