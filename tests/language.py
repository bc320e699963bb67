r"""The language of the project: words and forms that it does not use, each with reason and remedy.

    uv run python tests/language.py [FILE ...]

prints all findings in the project or in the files named; `test_language.py` requires that there
are none. What is searched: pages of text, and of Python files the comments, the docstrings and
(but for tests) the other string literals. Text in backticks is code and is not searched.
"""

import ast
import bisect
import collections
import dataclasses
import pathlib
import re
import sys
import token
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRODUCT = ("qerl_jax", "pallas_kernels", "experiments", "benchmarks")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
# These two name what they forbid.
LEFT_OUT = ("tests/language.py", "tests/test_language.py")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Words that are not used.

    Attributes:
        name: the rule's name in messages and in `EXCEPTIONS`.
        pattern: a regular expression in lower case for whole words (case is ignored). A space
            matches any gap between two words, also one from a line of a comment or a string
            literal to the next.
        reason: why the words are not used.
        remedy: what to write instead.
        bad: a text with exactly one finding.
        allowed: a regular expression of longer texts in which the words are right.
        good: a text without a finding.
        inside: whether parts of words and of names in code count, as in `dequantise_rows`.
    """

    name: str
    pattern: str
    reason: str
    remedy: str
    bad: str
    allowed: str = ""
    good: str = ""
    inside: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
    """A place where a rule does not hold: path from the root of the project, line, words, rule."""

    path: str
    line: int
    words: str
    rule: str
    reason: str
    remedy: str

    def __str__(self):
        words = " ".join(self.words.split())
        if len(words) > 60:
            words = f"{words[:57]}..."
        return (
            f"{self.path}:{self.line}: {words!r}: {self.rule}: {self.reason}. Write {self.remedy}."
        )


def _any(words):
    return "|".join(words.split())


_PERSON = "a pronoun for persons that stands for code"
_PRIVATE = "a word that has this meaning in this project only"
_PEOPLE = _any(
    "people persons? users? readers? authors? engineers? researchers? developers? contributors?"
    " newcomers? anyone everyone those"
)
_BRITISH_VERBS = _any(
    "categori characteri customi factori finali generali initiali locali materiali maximi memori"
    " minimi normali optimi organi paralleli penali prioriti quanti randomi reali recogni regulari"
    " seriali speciali standardi summari synchroni tokeni utili vectori visuali"
)

RULES = (
    Rule(
        "likewise",
        r"likewise",
        "the reader has to find out what is repeated",
        "the words again, or 'as in `name`'",
        bad="cost: likewise.",
    ),
    Rule(
        "person",
        r"(whoever|whosoever|whom|nobody|somebody|everybody)",
        _PERSON,
        "the name of the function, argument or process, 'no X' or 'every X'",
        bad="Whoever reads the file closes it.",
        good="The function whose result is stored.",
    ),
    Rule(
        "who",
        r"who",
        _PERSON,
        "'which', 'that' or the name of the function ('users who ...' is right)",
        bad="The thread who holds the lock.",
        allowed=rf"({_PEOPLE}),? who",
        good="For people who train on one GPU.",
    ),
    Rule(
        "told",
        r"(is|are|was|were|be|been|being) told",
        "nothing can be told to code",
        "'receives ...', 'gets ... as an argument', 'is called with ...'",
        bad="A worker is told the widths.",
        good="What a user told the model.",
    ),
    Rule(
        "given away",
        r"(given|gives?|giving) away",
        "JAX has another word for this",
        "'donated', 'donates'",
        bad="The cache is given away.",
        good="The function that is given.",
    ),
    Rule(
        "of one's own",
        r"of (one|your)('s)? own",
        "a figure of speech",
        "'custom', 'user-defined' or 'your own' before the noun",
        bad="A schedule of one's own.",
        good="A process of its own.",
    ),
    Rule(
        "so many",
        r"so many",
        "which number is meant is left to the reader",
        "the number or its name, 'N prompts', 'that number of prompts'",
        bad="Compiles for so many prompts.",
    ),
    Rule(
        "there is none",
        r"there (is|are|was|were) none",
        "the noun is missing",
        "a sentence with the noun, 'without a checkpoint'",
        bad="None if there is none.",
        good="There is no checkpoint.",
    ),
    Rule(
        "seat",
        r"seat(s|ed|ing|ings)?",
        _PRIVATE,
        "'slot', and 'insert' for what is done to a row",
        bad="A free seat takes the next prompt.",
        inside=True,
    ),
    Rule(
        "room",
        r"rooms?",
        _PRIVATE,
        "'memory', 'space', 'fits' or 'padding', and 'folder' for a package",
        bad="If the tiling has room for the adapter.",
    ),
    Rule(
        "door",
        r"(doors?|houses?)",
        _PRIVATE,
        "'entry point', 'interface', or the name of the function or folder",
        bad="The one door for weights.",
    ),
    Rule(
        "behind",
        r"behind",
        "in lists, loops and programs one thing comes after another",
        "'after', 'following', 'past the end of'",
        bad="The projection behind the norm.",
        allowed=r"(lags?|lies?|left|leaves?|hidden|hides?|falls?|waits?|%) behind",
        good="The sampler lags behind.",
    ),
    Rule(
        "looked at",
        r"(is|are|was|were|be|been|being) looked at",
        "a result is read, not looked at",
        "'read', 'examined', 'drained'",
        bad="The chunk is looked at later.",
    ),
    Rule(
        "copy engine",
        r"copy engines?",
        "not the unit's name",
        "'TMA'",
        bad="The copy engine fills shared memory.",
    ),
    Rule(
        "multiprocessor",
        r"multiprocessors?",
        "not the name in use",
        "'SM', 'SMs'",
        bad="One kernel on each multiprocessor.",
    ),
    Rule(
        "blocks of threads",
        r"blocks? of threads",
        "not the name in use",
        "'CTA', 'CTAs'",
        bad="Two blocks of threads add to a tile.",
    ),
    Rule(
        "British spelling",
        rf"({_BRITISH_VERBS})s(e|es|ed|ing|er|ers|ation|ations|able)"
        r"|behaviours?|colour(s|ed)?|favour(s|ed|ite|able)?"
        r"|neighbour(s|ing|hood)?|honours?|labours?|centre[sd]?|centring|metres?"
        r"|analys(ed|er|ing)|artefacts?|modell(ed|ing)|labell(ed|ing)|travell(ed|ing)"
        r"|cancelling|signall(ed|ing)|learnt|spelt|burnt|whilst|amongst|grey|defence|licences?"
        r"|programmes?|ageing|judgements?|fulfil",
        "the project spells as Americans do",
        "-ize, -or, -er, -eled: 'optimizer', 'behavior', 'center', 'labeled'",
        bad="The optimiser has two moments.",
        good="The optimizer's precise analyses are realistic.",
        inside=True,
    ),
)

# What the entries of docstrings and the help texts of commands do not begin with.
BEGINNING = Rule(
    "half a phrase",
    r"(of|for|that|to|see|likewise)\b",
    "an entry or a help text is read without its neighbors",
    "a phrase that stands alone, 'number of prompts', 'dtype of the result'",
    bad="of the result.",
)
ENTRY = Rule(
    "entry without a name",
    "",
    "in Args, Attributes and Raises each line 4 spaces in begins an entry",
    "'name: description.', and lines that continue an entry 8 spaces in",
    bad="the first of two",
)
INDENTATION = Rule(
    "indentation of a section",
    "",
    "all docstrings have one form",
    "entries 4 spaces to the right of the section's name",
    bad="  x: activations.",
)
CAPITAL = Rule(
    "capital",
    "",
    "all docstrings have one form",
    "descriptions in lower case, unless they begin with a name in code",
    bad="x: The activations.",
)
PERIOD = Rule(
    "no period",
    "",
    "all docstrings have one form",
    "a period at the end of the entry",
    bad="x: activations",
)
# (path, rule, words in the line): lines in which the rule does not hold, each with its reason.
EXCEPTIONS: tuple[tuple[str, str, str], ...] = ()

# A space of a pattern: a gap between two words, also where a comment or a literal goes on below.
_GAP = r"""(?:\s+(?:\#+\s+)?|\s*["']\s*\n\s*[rf]{0,2}["']\s*)"""
_HELP = re.compile(rf"help=\s*\"({BEGINNING.pattern}[^\"]*)", re.IGNORECASE)
_SECTION = re.compile(r"^ +(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
_HEADER = re.compile(r"(Args|Attributes|Returns|Yields|Raises):\s*")
_NAMED = ("Args", "Attributes", "Raises")
_ENTRY = re.compile(r"[\w.*]+(?:, [\w.*]+)*(?: \([\w \[\],.|]+\))?:(?: |$)")
_WORD = re.compile(r"([A-Z][a-z']+(?= )|A(?= (?!of |and )[a-z]))")
_PROPER = _any(
    "None True False Python Pallas Mosaic Triton Hopper Blackwell Llama Qwen Hugging Adam Gaussian"
    " Student's Welch's Kahn's Kahan's English Unicode Unix Linux Ctrl"
).split("|")
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_INSIDE = re.compile(r"\w")
_BEFORE = re.compile("[a-z]*$")
_INDENT = 4


def _compiled(rule):
    """The rule for text in lower case; a check of word boundaries in front would make it slow."""
    end = "(?![a-z])" if rule.inside else r"(?!\w)"
    pattern = rf"(?:{rule.pattern}){end}"
    if rule.allowed:
        pattern = rf"(?P<allowed>(?:{rule.allowed}){end})|{pattern}"
    return re.compile(pattern.replace(" ", _GAP))


_SEARCHES = [(rule, _compiled(rule)) for rule in RULES]
_BEGINNING = re.compile(BEGINNING.pattern, re.IGNORECASE)


def files(root=ROOT):
    """The paths of all pages and Python files of a project."""
    pages = [path for pattern in PAGES for path in sorted(root.glob(pattern))]
    product = [path for package in PRODUCT for path in sorted((root / package).rglob("*.py"))]
    tests = sorted((root / "tests").rglob("*.py"))
    found = [*pages, *product, *tests]
    return [path for path in found if path.relative_to(root).as_posix() not in LEFT_OUT]


def findings(root=ROOT, paths=None, exceptions=EXCEPTIONS):
    """All findings in files, by default in those of the project."""
    paths = files(root) if paths is None else paths
    sources = {path: path.read_text() for path in paths}
    classes = {name for text in sources.values() for name in _CLASS.findall(text)}
    found = []
    for path, text in sources.items():
        name = path.relative_to(root).as_posix()
        of_words = _words_of_page if path.suffix == ".md" else _words_of_module
        lines = text.splitlines()
        for line, words, rule in [
            *of_words(text, is_test=name.startswith("tests/")),
            *(_forms(text, classes) if path.suffix == ".py" else ()),
        ]:
            if not any(
                (name, rule.name) == (where, what) and part in lines[line - 1]
                for where, what, part in exceptions
            ):
                found.append(Finding(name, line, words, rule.name, rule.reason, rule.remedy))
    return sorted(found, key=lambda finding: (finding.path, finding.line))


def _matches(text):
    """Offsets, words and rules that match anywhere in a text, code or not."""
    lower = text.lower()
    for rule, pattern in _SEARCHES:
        for match in pattern.finditer(lower):
            begin, end = match.span()
            if rule.allowed and match["allowed"]:
                continue
            if rule.inside:
                begin -= len(_BEFORE.search(lower[max(0, begin - 20) : begin])[0])
            elif begin and _INSIDE.match(lower, begin - 1):
                continue
            yield begin, text[begin:end], rule


def _in_backticks(text, offset):
    """Whether the part of a line is code in backticks."""
    return text.count("`", text.rfind("\n", 0, offset) + 1, offset) % 2 == 1


def _words_of_page(text, *, is_test):
    """The findings in a page of text, outside of fenced blocks and of backticks."""
    del is_test
    fences = [match.start() for match in re.finditer("^ *```", text, re.MULTILINE)]
    for offset, words, rule in _matches(text):
        fenced = bisect.bisect(fences, offset) % 2 == 1
        if not fenced and not _in_backticks(text, offset):
            yield text.count("\n", 0, offset) + 1, words, rule


def _words_of_module(text, *, is_test):
    """The findings in comments and string literals of a module, of a test only in docstrings."""
    matches = list(_matches(text))
    if not matches:  # Most modules, and tokens take a hundred times as long as matches.
        return
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    spans = []  # begin, end, whether the token is text
    before = token.NEWLINE
    for item in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        begin, end = (starts[row - 1] + column for row, column in (item.start, item.end))
        if item.type in (token.STRING, token.FSTRING_MIDDLE):
            is_docstring = before in (token.NEWLINE, token.INDENT, token.DEDENT)
            is_text = is_docstring or (not is_test and any(map(str.isspace, item.string)))
            spans.append((begin, end, is_text))
        elif item.type in (token.COMMENT, token.NAME):
            spans.append((begin, end, item.type == token.COMMENT))
        if item.type not in (token.NL, token.COMMENT):
            before = item.type
    begins = [begin for begin, _, _ in spans]
    for offset, words, rule in matches:
        i = bisect.bisect(begins, offset) - 1
        begin, end, is_text = spans[max(i, 0)]
        if begin <= offset < end:
            is_name = text[begin:end].isidentifier() and not is_text
            if rule.inside if is_name else is_text and not _in_backticks(text, offset):
                yield bisect.bisect(starts, offset), words, rule


def _forms(text, classes):
    """The findings in the entries of docstrings and in help texts."""
    for match in _HELP.finditer(text):
        yield text.count("\n", 0, match.start(1)) + 1, match[1], BEGINNING
    if _SECTION.search(text):  # Few tests, and parsing takes a hundred times as long.
        yield from _docstrings(ast.parse(text), classes)


def _docstrings(node, classes):
    """The findings in the docstrings of a class or function and of those inside it."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield from _docstrings(statement, classes)
        elif isinstance(statement, ast.Expr) and isinstance(
            getattr(statement.value, "value", None), str
        ):
            yield from _entries(statement.value, classes)


def _entries(docstring, classes):
    """The findings in the sections of a docstring."""
    lines = docstring.value.splitlines()
    base = docstring.col_offset
    section, entry, entry_line = "", "", 0

    def checked():
        if entry:
            yield from _checked(section, entry, docstring.lineno + entry_line, classes)

    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if i and indent == base:
            yield from checked()
            header = _HEADER.fullmatch(line.strip())
            section, entry = header[1] if header else "", ""
        elif section:
            if indent < base + _INDENT:
                yield docstring.lineno + i, line, INDENTATION
            elif indent == base + _INDENT and (section in _NAMED or not entry):
                yield from checked()
                entry, entry_line = line.strip(), i
            else:
                entry += f" {line.strip()}"
    yield from checked()


def _checked(section, entry, line, classes):
    """The findings in an entry of a section."""
    if section in _NAMED:
        name = _ENTRY.match(entry)
        if name is None:
            yield line, entry, ENTRY
            return
        description = entry[name.end() :].strip()
        if section != "Raises" and _BEGINNING.match(description):
            yield line, entry, BEGINNING
        word = _WORD.match(description)
        if word and word[1] not in _PROPER and word[1] not in classes:
            yield line, entry, CAPITAL
    if not entry.endswith((".", ".)")):
        yield line, entry, PERIOD


def main(arguments):
    """Prints the findings, and how many of them each file and each rule has."""
    paths = [pathlib.Path(argument).resolve() for argument in arguments] or None
    found = findings(paths=paths)
    print(*found, sep="\n")
    for field in ("path", "rule"):
        counts = collections.Counter(getattr(finding, field) for finding in found)
        print("", *(f"{n:6} {name}" for name, n in counts.most_common()), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
