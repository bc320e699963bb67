"""The turns of gpt-oss: channels, reasoning and calls (https://github.com/openai/harmony).

A turn follows `<|start|>assistant` and has one or more messages, which `<|start|>assistant` also
separates:

    <|channel|>analysis<|message|>REASONING<|end|>
    <|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

` to=functions.NAME` may be in front of the channel, too. `<|return|>` and `<|call|>` end the turn.
"""

import re
from typing import NamedTuple

FUNCTIONS = "functions."  # what the names of tools begin with where a message is for one
END_TOKENS = ("<|return|>", "<|call|>")  # tokens that end a turn
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
# A text that is too long for its tokens may end with the end of a document.
_END = re.compile(r"<\|(?:end|return|call|endoftext)\|>")
_CHANNEL_NAME = re.compile(rf"{re.escape(_CHANNEL)}([^\s<]*)")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


class Message(NamedTuple):
    """A message of a turn."""

    channel: str  # 'analysis', 'commentary', 'final', or what the policy wrote
    recipient: str  # what it is for, such as 'functions.NAME'; '' for the user
    text: str


def is_harmony(template: str) -> bool:
    """Returns whether a chat template writes conversations in this format."""
    return all(tag in template for tag in (_START, _CHANNEL, _MESSAGE))


def messages_of(text: str) -> list[Message]:
    """Returns the messages of a turn, from its text with special tokens.

    Text without a header's end, `<|message|>`, is no message; nor is what the policy writes as if
    it were another speaker.
    """
    found, position = [], 0
    while (begin := text.find(_MESSAGE, position)) >= 0:
        header = text[position:begin]
        _, start, role = header.partition(_START)
        begin += len(_MESSAGE)
        end = _END.search(text, begin)
        if not start or role.startswith("assistant"):
            header = role.removeprefix("assistant") if start else header
            channel = _CHANNEL_NAME.search(header)
            recipient = _RECIPIENT.search(_CHANNEL_NAME.sub("", header))
            found.append(
                Message(
                    channel[1] if channel else "",
                    recipient[1] if recipient else "",
                    text[begin : end.start()] if end else text[begin:],
                )
            )
        if end is None:
            break
        position = end.end()
    return found


def channel_of(messages: list[Message], channel: str) -> str:
    """Returns what a turn says in a channel to the user, as one text."""
    return "\n".join(m.text for m in messages if m.channel == channel and not m.recipient)


def answer(text: str) -> str:
    """Returns the answer of a turn, its final channel; '' where it has none."""
    return channel_of(messages_of(text), "final")


def transcript(text: str) -> str:
    """Returns all messages of a turn, each after what it is; a longer turn only adds to its end."""
    messages = messages_of(text)
    return "\n\n".join(f"[{_label(message)}]\n{message.text}" for message in messages)


def other_messages(text: str) -> list[tuple[str, str]]:
    """Returns what the messages of a turn besides its answer are, and their texts."""
    others = (m for m in messages_of(text) if m.channel != "final" or m.recipient)
    return [(_label(message), message.text) for message in others]


def _label(message: Message) -> str:
    return message.channel + (f" to={message.recipient}" if message.recipient else "")


def keeping_history(template: str) -> str:
    """Returns a chat template of gpt-oss that writes earlier turns as they were.

    OpenAI's drops the reasoning of a turn once an answer follows it, and ends an answer in another
    way than the policy did. In a template that has other statements for it nothing is replaced.
    """
    reasoning = f'"{_START}assistant{_CHANNEL}analysis{_MESSAGE}" + message.thinking + "<|end|>"'
    final = f'"{_START}assistant{_CHANNEL}final{_MESSAGE}" + message.content + '
    kept = f"{{%- if message.thinking %}}{{{{- {reasoning} }}}}{{%- endif %}}"
    answers = [f'{{{{- {final}"{end}" }}}}' for end in ("<|end|>", "<|return|>")]
    template = template.replace(answers[0], kept + answers[1])
    return template.replace(" and not future_final_message.found", "")
