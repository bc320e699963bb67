"""The project's texts use none of the words and forms that `language.py` lists.

`uv run python tests/language.py` prints every place where one is used.
"""

import language
import pytest


def found(folder, path, text):
    """The names of the rules that a file does not keep, and the lines."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return [(finding.rule, finding.line) for finding in language.findings(folder)]


def module(arguments, name="x"):
    """A module with a function that has a section of arguments."""
    return f'def f({name}):\n    """Doubles.\n\n    Args:\n{arguments}\n    """\n'


def test_no_findings():
    findings = [str(finding) for finding in language.findings()]
    if findings:
        listed = "\n".join(findings)
        pytest.fail(f"{len(findings)} findings:\n{listed}", pytrace=False)


def test_every_kind_of_file_is_read():
    names = {path.relative_to(language.ROOT).as_posix() for path in language.files()}
    assert {"README.md", "docs/design.md", "qerl_jax/rl/losses.py", "tests/tiny_run.py"} <= names


@pytest.mark.parametrize("rule", language.RULES, ids=lambda rule: rule.name)
def test_words_are_found_in_text_of_every_kind(tmp_path, rule):
    expected = [(rule.name, 1)]
    for path, text in (
        ("README.md", f"{rule.bad}\n"),
        ("docs/page.md", f"- {rule.bad.upper()}\n"),
        ("qerl_jax/a.py", f"# {rule.bad}\n"),
        ("qerl_jax/a.py", f'"""{rule.bad}"""\n'),
        ("benchmarks/a.py", f'print("It: {rule.bad}")\n'),
        ("experiments/a.py", f'print(f"It {{1}}: {rule.bad}")\n'),
        ("tests/a.py", f'def f():  # {rule.bad}\n    """Is short."""\n'),
    ):
        assert found(tmp_path, path, text) == expected, (path, text)
        (tmp_path / path).write_text("")


@pytest.mark.parametrize("rule", language.RULES, ids=lambda rule: rule.name)
def test_words_are_found_across_lines(tmp_path, rule):
    first, rest = rule.bad.split(maxsplit=1)
    for text in (
        f"# {first}\n# {rest}\n",
        f'"""{first}\n{rest}\n"""\n',
        f'print("{first} "\n      f"{rest} ")\n',
    ):
        assert [name for name, _ in found(tmp_path, "qerl_jax/a.py", text)] == [rule.name], text


@pytest.mark.parametrize("rule", language.RULES, ids=lambda rule: rule.name)
def test_what_only_looks_similar_is_not_found(tmp_path, rule):
    assert found(tmp_path, "README.md", f"{rule.good}\n`{rule.bad}`\n```\n{rule.bad}\n```\n") == []
    name = rule.bad.rstrip(".").replace(" ", "_").replace("'", "").lower()
    code = f"{name} = 1\n" if not rule.inside else ""
    text = f'"""{rule.good} Or `{rule.bad}`."""\n{code}'
    assert found(tmp_path, "qerl_jax/a.py", text) == []
    assert found(tmp_path, "tests/a.py", f'print("{rule.bad}")\n') == []


def test_names_are_searched_too(tmp_path):
    text = "def dequantise_rows(x):\n    return x.free_seats\n"
    assert found(tmp_path, "tests/a.py", text) == [("British spelling", 1), ("seat", 2)]


@pytest.mark.parametrize("word", ["of", "for", "that", "to", "see", "Likewise"])
def test_entries_and_help_texts_stand_alone(tmp_path, word):
    rule = language.BEGINNING.name
    findings = found(tmp_path, "qerl_jax/a.py", module(f"        x: {word} them."))
    assert (rule, 5) in findings
    findings = found(tmp_path, "qerl_jax/a.py", f'add("--x",\n    help="{word} them")\n')
    assert (rule, 2) in findings
    assert found(tmp_path, "qerl_jax/a.py", module("        x: offset of the number.")) == []


@pytest.mark.parametrize(
    ("arguments", "rule", "line"),
    [
        ("      x: the number.", language.INDENTATION, 5),
        ("        x: the number\n          to double.\n        twice", language.ENTRY, 7),
        ("        x: The number.", language.CAPITAL, 5),
        ("        x: A number.", language.CAPITAL, 5),
        ("        x: the number", language.PERIOD, 5),
        ("        x: the number\n            to double\n        y: another.", language.PERIOD, 5),
    ],
)
def test_form_of_entries(tmp_path, arguments, rule, line):
    found(tmp_path, "qerl_jax/a.py", module(arguments))
    findings = language.findings(tmp_path)
    assert (rule.name, line) in [(finding.rule, finding.line) for finding in findings]


def test_good_docstrings_have_no_findings(tmp_path):
    text = '''class Batch:
    """Rows of a step.

    Attributes:
        tokens: int32 [B, T] token ids,
            padded at the end.
        a, b: LoRA's A [R, K] and B [N, R].
    """

    def split(self, parts, *sizes):
        """Splits the batch.

        Args:
            parts: None for one part.
            *sizes: A [R, K] is one of them. (B is another.)

        Returns:
            The parts. A paragraph may follow

            and is not an entry: of course.

        Raises:
            UserError: fewer rows than parts.
        """
'''
    assert found(tmp_path, "qerl_jax/a.py", text) == []


def test_exceptions_are_of_a_line(tmp_path):
    found(tmp_path, "qerl_jax/a.py", "# The room.\n# Room 2.\n")
    exceptions = (("qerl_jax/a.py", "room", "The room"),)
    assert [f.line for f in language.findings(tmp_path, exceptions=exceptions)] == [2]


def test_exceptions_are_needed():
    for path, rule, part in language.EXCEPTIONS:
        everything = language.findings(paths=[language.ROOT / path], exceptions=())
        lines = (language.ROOT / path).read_text().splitlines()
        assert any(
            (finding.path, finding.rule) == (path, rule) and part in lines[finding.line - 1]
            for finding in everything
        ), f"{path} has no longer the words of the exception {part!r}"


def test_a_finding_says_where_what_why_and_what_to_write(tmp_path):
    (tmp_path / "README.md").write_text("First.\nThe copy engine.\n")
    (finding,) = language.findings(tmp_path)
    assert str(finding) == (
        "README.md:2: 'copy engine': copy engine: not the unit's name. Write 'TMA'."
    )
