r"""The answer of a text: its boxes and tags, and the number in it.

A *marked* answer is the content of the last boxes, `\boxed{...}`, or of the last
`<answer>...</answer>`, whichever ends later.
"""

import re
from decimal import Decimal
from typing import NamedTuple

_BOX_TOKEN = {
    name: re.compile(rf"\\{name}(?![a-zA-Z])\s*(?P<open>\{{)?|\\[{{}}]|[{{}}]")
    for name in ("boxed", "fbox")
}
# The content of a box without braces, `\boxed 8`: in a formula up to its end, else up to a space.
_BARE_FORMULA = re.compile(r"(?=[-+.0-9a-zA-Z\\])(?:(?!\\[)\]])[^$\n{}]|\{[^{}\n]*\})+")
_BARE_WORD = re.compile(r"(?=[-+.]?[0-9]|\\[a-zA-Z])(?:[^$\s{}]|\{[^{}\n]*\})+")
_FORMULA_END = re.compile(r"\\[)\]]")
_WORDS = r"\\(?:text|textrm|textnormal|mathrm|mbox|hbox)(?![a-zA-Z])"
# What joins boxes into one answer: commas, "and", "or", spacing, and a name that each box is equal
# to. math-verify 0.9.0 joins the same boxes.
_JOINT = re.compile(
    rf"(?:[\s,;~${{}}]|\\[()\[\],;:! ]|\\q?quad\b|{_WORDS}|\b(?:and|or)\b|\b[a-zA-Z](?:_\w)?\s*=)*"
)

_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)}])(?<![0-9]!)[-+])?\\?\$?"  # `5-3` holds an operator, not a sign
    r"(?P<digits>[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"(?P<fraction> ?/ ?[0-9]+)?"
)
# 1,000,000, which is written 10,00,000 in India and 100,0000 in China and Japan
_GROUPS = re.compile(
    r"[0-9]*|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})*,[0-9]{3}|[0-9]{1,4}(?:,[0-9]{4})+"
)
_SPACE = r"(?:[ ~\u00a0\u2009\u202f]|\\[ ,;:]|\\thinspace\s?)"
_SPACED_GROUPS = re.compile(rf"(?<![0-9.,])[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?![0-9])")
_THIN_SPACE = re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))")
# Digits after letters, as in H2O. In `18m2` the letters are a unit, in `1.5e3` an exponent.
_WORD_WITH_DIGITS = re.compile(
    r"(?:(?<![a-zA-Z0-9\\])|(?<=[0-9])(?![eE][-+]?[0-9]))[a-zA-Z]+[0-9][a-zA-Z0-9]*"
)
# An argument in LaTeX is braces (here with two levels of braces inside), a command or a character.
_INNER = r"[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*"
_ARGUMENT = rf"\s*(?:\{{{_INNER}\}}|\\[a-zA-Z]+|[^\s{{}}\\])"
_FRACTION = re.compile(
    rf"\\[dtc]?frac(?![a-zA-Z]){_ARGUMENT}{_ARGUMENT}"
    r"|\\(?:over|above|atop)(?![a-zA-Z])\s*\{?\s*[-+]?[0-9.,]*"
)

_WRAPPER = re.compile(
    rf"{_WORDS}|\\(?:mathbf|mathit|textbf|textit|emph|bf|rm|boxed|fbox|left|right|displaystyle)"
    r"(?![a-zA-Z])"
)
_UNIT_POWER = re.compile(r"(?:(?<=[a-zA-Z]{2})|(?<=[ /][ms]))\s*\^\s*[0-9]")
_EQUALS = re.compile(r"=|\\(?:approx|equiv|simeq)(?![a-zA-Z])|\u2248")
_LIST = re.compile(r"(?:[\s,;%()\[\]$\\]|and|or|\b[a-zA-Z](?:_\w)?\s*=)*")
# Commands next to a number that do not change its value.
_UNIT = r"(?:q?quad|space|circ|degree|pounds|euro|cents|Omega|mu|therefore)(?![a-zA-Z])"
_OPERAND = r"(?:[0-9)\]!]|(?<![a-zA-Z])[a-zA-Z])"
_SUPERSCRIPT = "\u00b2\u00b3\u00b9\u2070\u2074-\u2079"
_OPERATOR_BEFORE = re.compile(
    rf"(?:[/^_\u00d7\u00f7\u00b7\u00b1\u221a]|\\(?!{_UNIT})[a-zA-Z]+|\\\\|{_OPERAND}\s*(?:[-+\u2013]|\*+)"
    rf"|[0-9]\s*:)[\s(\[]*$|{_OPERAND}[(\[]+$"
)
_OPERATOR_AFTER = re.compile(
    rf"\s*(?:\^(?!\s*\\circ)|[\u00d7\u00f7\u00b7\u221a!{_SUPERSCRIPT}]|\\\\|\\(?!{_UNIT})[a-zA-Z]"
    r"|[-+*/:]\s*(?:[0-9(\\]|[a-zA-Z](?![a-zA-Z])))|\(|[einkxyz\u03c0](?![a-zA-Z])"
)
# Largest difference of equal numbers; and that of numbers below SMALL, as a part of the larger one.
TOLERANCE, SMALL, RELATIVE = Decimal("1e-6"), Decimal("0.01"), Decimal("1e-5")
_NEAR = 40  # number of characters next to a number that are searched for an operator


# --- Reasoning ------------------------------------------------------------------------------------


def opens_reasoning(prompt: str) -> bool:
    """Returns whether a prompt ends in `<think>`: a chat template may open the reasoning."""
    return prompt.rstrip().endswith("<think>")


def answer_part(prompt: str, completion: str) -> str:
    """Returns the part of a completion that answers: what follows its reasoning.

    The first `</think>` ends the reasoning, and a later one that of a later `<think>`; any other is
    a part of the answer, such as a quotation. A reasoning that the completion or the prompt opens
    and that is not closed is no answer: the part ends before it, and is empty where nothing was
    closed. TRL's `reasoning_accuracy_reward` and lm-eval's `think_end_token` read the same part,
    but where an answer quotes `</think>`. Text without reasoning is an answer as a whole.
    Example: `<think>Is it 3? No.</think> It is 4.` gives ` It is 4.`, `<think>Is it 3?` nothing.
    """
    parts = completion.split("</think>")
    if len(parts) == 1 and (opens_reasoning(prompt) or "<think>" in completion):
        return ""
    begin = min(1, len(parts) - 1)
    for number, part in enumerate(parts[1:-1], 1):
        if "<think>" in part or (begin == number and not part.strip()):  # closed twice
            begin = number + 1
    return "</think>".join(parts[begin:]).partition("<think>")[0]


# --- Boxes and tags -------------------------------------------------------------------------------


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last boxes, or None if there is no box.

    A box is a balanced `\boxed{...}`, a number or a command without braces (`\boxed 8`), or, in a
    text without `\boxed`, the same with `\fbox`. Boxes that are joined only by commas, "and", "or",
    spacing or `\text{}` are one answer, whose parts are joined by commas. Otherwise the last box
    counts.
    Example: `\boxed{1}. Then \boxed{2} or \boxed{\frac{1}{2}}` gives `2, \frac{1}{2}`.
    """
    answer = _last_boxes(text)
    return None if answer is None else answer[0]


def last_tagged(text: str) -> str | None:
    """Returns the content of the last closed `<answer>...</answer>`, or None without such a tag."""
    span = _last_tagged_span(text)
    return None if span is None else text[span[0] : span[1]]


def last_marked(text: str) -> str | None:
    r"""Returns the marked answer, or None if the text has no mark.

    The marked answer is the answer of `last_boxed` or the last `<answer>...</answer>`, whichever
    ends later. A box inside the tags is opened: `<answer>\boxed{18}</answer>` gives `18`.
    """
    boxed, span = _last_boxes(text), _last_tagged_span(text)
    if span is None or (boxed is not None and boxed[1] > span[1]):
        return None if boxed is None else boxed[0]
    tagged = text[span[0] : span[1]]
    inner = last_boxed(tagged)
    return tagged if inner is None else inner


class _Box(NamedTuple):
    begin: int  # position of its command
    start: int  # position of its content
    end: int  # position after its content; -1 of a box without braces, see `_bare_content`
    in_formula: bool = False  # whether a box without braces is in a formula

    def content(self, text: str) -> tuple[str, int]:
        """The content, and the position after the box."""
        if self.end >= 0:
            return text[self.start : self.end], self.end + 1
        content = _bare_content(text, self.start, in_formula=self.in_formula)
        return content, self.start + len(content)


def _last_boxes(text: str) -> tuple[str, int] | None:
    """Returns the answer of the last boxes and the position of their end."""
    boxes = _boxes(text)
    contents: list[str] = []
    begin = end = 0
    # Content is read from the end on, as long as boxes are joined: each text is read once.
    while boxes:
        box = boxes.pop()
        content, stop = box.content(text)
        if not content and box.end < 0:
            continue  # `\\boxed` in a sentence is no box.
        if not contents:
            end = stop
        elif not content.strip() or not _JOINT.fullmatch(text, stop, begin):
            break
        begin = box.begin
        contents.append(content)
        if not content.strip():
            break
    if not contents:
        return None
    return ", ".join(dict.fromkeys(reversed(contents))), end  # A repeated answer is one answer.


def _boxes(text: str) -> list[_Box]:
    """Returns every box that is not inside another; those without braces may have no content."""
    name = next((name for name in _BOX_TOKEN if f"\\{name}" in text), None)
    if name is None:
        return []
    boxes: list[_Box] = []
    open_boxes: list[tuple[int, int] | None] = []  # by open brace: begin and start of its box
    dollars = position = 0
    for token in _BOX_TOKEN[name].finditer(text):
        if token["open"]:
            open_boxes.append((token.start(), token.end()))
        elif token[0].startswith(f"\\{name}"):
            span = position, token.start()
            dollars, position = dollars + text.count("$", *span) - text.count("\\$", *span), span[1]
            boxes.append(_Box(token.start(), token.end(), -1, dollars % 2 == 1))
        elif token[0] == "{":
            open_boxes.append(None)
        elif token[0] == "}" and open_boxes:
            box = open_boxes.pop()
            if box is not None:
                while boxes and boxes[-1].begin > box[0]:
                    boxes.pop()
                boxes.append(_Box(*box, token.start()))
    return boxes


def _bare_content(text: str, start: int, *, in_formula: bool) -> str:
    match = (_BARE_FORMULA if in_formula else _BARE_WORD).match(text, start)
    return "" if match is None else _FORMULA_END.split(match[0])[0].rstrip(" .,;:")


def _last_tagged_span(text: str) -> tuple[int, int] | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else (start + len("<answer>"), end)


# --- Numbers --------------------------------------------------------------------------------------


def last_number(text: str) -> Decimal | None:
    r"""Returns the exact value of the last number in a text, or None if there is no number.

    Reads `-3`, `3.50`, `1,000`, `1,00,000`, `1{,}000`, `$18`, `18 dollars`, `5%`, `1.5e3` and
    Unicode's minus. Also returns None if the last number is a fraction (`1/2`, `\frac{x}{2}`),
    whose value is not 2. Digits inside a word (`H2O`) are no number.
    """
    last = None
    for last in _NUMBER.finditer(_without_words(_plain(text))):  # noqa: B007
        pass
    if last is None or last["fraction"]:
        return None
    if not _has_valid_groups(last):  # `1,2,3` lists numbers.
        return Decimal(f"{last['digits'].rpartition(',')[2]}{last['exponent'] or ''}")
    return _value(last)


def whole_number(text: str) -> Decimal | None:
    """Returns the value of a text that is one number and nothing else, or None for any other text.

    The notations are the notations of `last_number`.
    """
    match = _NUMBER.fullmatch(_plain(text).strip())
    return (
        None
        if match is None or match["fraction"] or not _has_valid_groups(match)
        else _value(match)
    )


def marked_number(text: str) -> Decimal | None:
    r"""Returns the exact value of a marked or a reference answer, or None if it is no number.

    As `last_number`, and in addition a space may separate thousands (`12 500`, `1\ 000`), the value
    of an equation is its right side, and units are left out. The last number has no value as a
    part of an expression (`\sqrt{5}`, `x + 2`) or of a list of numbers (`3, 5`).
    Example: `x = 18 \text{ m}^2` gives 18.
    """
    text = _WRAPPER.sub(" ", _plain(join_digits(text)))
    text = re.sub(r"\\?[{}]", " ", text)
    text = _without_words(_UNIT_POWER.sub("", text))
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    if last["fraction"] or not _has_valid_groups(last) or "frac" in text:
        return None
    if len(numbers) > 1 and _LIST.fullmatch(text, numbers[-2].end(), last.start()):
        return None
    before = _EQUALS.split(text[: last.start()])[-1].rstrip()
    after = _EQUALS.split(text[last.end() :])[0]
    if _OPERATOR_BEFORE.search(before[-_NEAR:]) or _OPERATOR_AFTER.match(after[:_NEAR]):
        return None
    value = _value(last)
    return -value if before.strip() == "-" else value


def completion_number(text: str) -> Decimal | None:
    """Returns the number that a completion answers, or None without a number.

    The marked answer counts; without a mark the line after the last `####`; and without `####` the
    last number in the text.
    """
    answer = last_marked(text)
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2].strip().partition("\n")[0]
    return last_number(text) if answer is None else marked_number(answer)


def same_number(number: Decimal, other: Decimal) -> bool:
    """Returns whether two numbers are equal, exactly or within what rounding leaves.

    They may differ by 1e-6, as in math-verify, which rounds to 6 decimals; numbers below 0.01, of
    which that leaves few digits or none, by 1e-5 of the larger one.
    Example: `0.166667` equals `0.1666667`; `3.1e-9` does not equal `3.1e-10`, nor `0` `5e-20`.
    """
    if number == other:
        return True
    largest = max(abs(number), abs(other))
    return abs(number - other) <= (TOLERANCE if largest >= SMALL else RELATIVE * largest)


def join_digits(text: str) -> str:
    r"""Returns a text without the spaces between groups of three digits: `1 000` and `1\,000`."""
    return _SPACED_GROUPS.sub(lambda match: re.sub(_SPACE, "", match[0]), text)


def _plain(text: str) -> str:
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "")
    text = _THIN_SPACE.sub("", text).replace("\\,", " ")
    return _FRACTION.sub("0/0", text)  # A fraction is a number without a value.


def _without_words(text: str) -> str:
    return _WORD_WITH_DIGITS.sub("w", text)


def _has_valid_groups(match: re.Match[str]) -> bool:
    """Returns whether every comma of a number separates a group of digits."""
    return _GROUPS.fullmatch(match["digits"].partition(".")[0]) is not None


def _value(match: re.Match[str]) -> Decimal:
    digits = match["digits"].replace(",", "")
    return Decimal(f"{match['sign'] or ''}{digits}{match['exponent'] or ''}")
