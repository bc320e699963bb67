"""The project's texts have none of the words of its former dialect; docstrings have one form."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PEOPLE = "people|persons?|users?|readers?|authors?|engineers?|researchers?|anyone|those"
VERBS = (
    "categori|characteri|customi|factori|finali|generali|initiali|locali|materiali|maximi|memori"
    "|minimi|normali|optimi|organi|paralleli|penali|prioriti|quanti|randomi|reali|recogni|regulari"
    "|seriali|speciali|standardi|summari|synchroni|tokeni|utili|vectori|visuali"
)
# Words that are not used, each with a text that has them. A space is any gap between two words.
WORDS = {
    r"likewise": "cost: likewise.",
    r"who(m|ever|soever)|(no|some|every)body": "Whoever reads the file closes it.",
    r"who": "The thread who holds the lock.",
    r"(is|are|was|were|be|been|being) told": "A worker is told the widths.",
    r"giv(en|es?|ing) away": "The cache is given away.",
    r"of (one|your)('s)? own": "A schedule of one's own.",
    r"so many": "# Compiles for so\n    # many prompts.",
    r"there (is|are|was|were) none": 'print("None if there "\n      "is none.")',
    r"(\w*_)?seat(s|ed|ings?)?": "A free seat takes the next prompt.",
    r"rooms?": "If the tiling has room for the adapter.",
    r"doors?|houses?": "The one door for weights.",
    r"behind": "The projection behind the norm.",
    r"(is|are|was|were|be|been|being) looked at": "The chunk is looked at later.",
    r"copy engines?": "The copy engine fills shared memory.",
    r"multiprocessors?": "One kernel on each multiprocessor.",
    r"blocks? of threads": "Two blocks of threads add to a tile.",
    r"artefacts?|defence|licences?|centre[ds]?|metres?|learnt|spelt|grey": "The centre.",
    r"whilst|amongst|programmes?|judgements?": "A few amongst them.",
}
# Parts of words, of names too.
PARTS = {
    rf"({VERBS})s(e[ds]?|ing|ers?|ations?|able)(?![a-z])": "def dequantise_rows(x):",
    r"(behavi|col|fav|neighb|hon|lab)our": "Its behaviour.",
    r"(analys|modell|labell|travell|cancell|signall)(ed|er|ing)(?![a-z])": "The labelled rows.",
}
# Where the words are right: who people are, code in backticks, names in code, what tests write.
RIGHT = re.compile(
    rf"\b({PEOPLE}),? who\b|(lags|lie|wait) behind|`[^`\n]*`|^ *```.*?^ *```"
    r"|\"(multiprocessors|behind)|room [=*]|~?nobody-of-this-name|i see\. there is none",
    re.MULTILINE | re.DOTALL,
)
# Words that become fewer, each with the most uses that there may be.
FEWER = {r"beside": 34, r"(go|goes|going|went) on": 16, r"(lie|lies|lay|lying) (in|at)": 28}
GAP = r"""(?:\s+(?:#\s+)?|\s*["']\s*\n\s*[rf]?["'])"""


def files():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    folders = ("qerl_jax", "pallas_kernels", "experiments", "benchmarks", "tests")
    modules = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    return sorted(path for path in (*pages, *modules) if path != pathlib.Path(__file__))


def without_right(text):
    """A text in lower case without what is right."""
    return RIGHT.sub(lambda right: "\n" * right[0].count("\n"), text.lower())


def found(text, words=WORDS, parts=PARTS):
    """The lines and the words of a text without what is right."""
    pattern = rf"\b(?:{'|'.join(words)})(?!\w)".replace(" ", GAP)
    matches = re.finditer("|".join([pattern, *parts]), text)
    return [(text.count("\n", 0, match.start()) + 1, match[0]) for match in matches]


def odd_entries(text):
    """The entries of docstrings that are not 'name: phrase in lower case.', and such help texts."""
    phrase = r"(?!(of|for|that|to|see)\b)(?!(The|An?|Whether|Number|If) (?!of |and )[a-z])"
    entry = re.compile(rf"[\w.*]+(, [\w.*]+)*( \([^)]*\))?:\s+{phrase}.*\.\)?", re.DOTALL)
    yield from (m[0] for m in re.finditer(rf'help=\s*"(?!{phrase})[^"]*', text))
    nodes = (
        ast.walk(ast.parse(text)) if re.search(r"^ +(Args|Attributes|Raises):$", text, re.M) else ()
    )
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
            for section in re.findall(r"^(?:Args|Attributes|Raises):\n((?: .*\n*)+)", doc, re.M):
                entries = re.split(r"\n+    (?=\S)", f"\n{section.rstrip()}")[1:]
                yield from (one for one in entries or [section] if not entry.fullmatch(one))


def test_no_text_has_these_words():
    texts = {path: path.read_text() for path in files()}
    plain = {path: without_right(text) for path, text in texts.items()}
    listed = [(path, *hit) for path, text in plain.items() for hit in found(text)]
    listed += [(p, one) for p, t in texts.items() if p.suffix == ".py" for one in odd_entries(t)]
    assert not listed, "\n".join(": ".join(map(str, one)) for one in listed)
    for words, most in FEWER.items():
        count = sum(len(found(text, [words], [])) for text in plain.values())
        assert count <= most, f"{words}: {count} uses, and not more than {most}"


@pytest.mark.parametrize(("words", "text"), [*WORDS.items(), *PARTS.items()])
def test_words_are_found(words, text):
    of = {"words": [words]} if words in WORDS else {"parts": [words]}
    assert len(found(text.lower(), **{"words": ["-"], "parts": []} | of)) == 1
    for right in (f"`{text}`", "For people who train on one GPU."):
        assert not found(without_right(right.replace("\n", " ")))


@pytest.mark.parametrize(
    "entry",
    ["of it.", "The number.", "A number.", "number", "number\n        to double\n        y: x."],
)
def test_entries_of_docstrings_have_one_form(entry):
    text = 'def f(x):\n    """Doubles.\n\n    Args:\n        x: {}\n    """\n'
    assert list(odd_entries(text.format(entry)))
    assert not list(odd_entries(text.format("A [R, K], the\n            factor.")))
