"""What an environment writes after a turn of the policy, as token ids that only append.

The ids of a reply are those of a short conversation with the reply, without those of the
conversation up to the token that ends the policy's turn. What the policy sampled is never encoded
again. A template that changes earlier turns when a conversation grows is refused: the policy would
be trained on conversations that nothing else ever writes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from qerl_jax.environments.tools import NO_ID
from qerl_jax.errors import UserError

Message = Mapping[str, Any]

_THOUGHT = "<think>\ndummy\n</think>\n\ndummy"
_DUMMY_CALLS = (("dummy", NO_ID),)
_CHARACTERS = 16  # of a token, at most, before a long text is encoded


class TemplateTokenizer(Protocol):
    """The part of a tokenizer that writes replies."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Token ids that end a turn."""
        ...

    def encode(self, text: str, /) -> Sequence[int]:
        """Returns the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], /, *, skip_special: bool = True) -> str:
        """Returns the text of token ids."""
        ...

    def answer(self, ids: Sequence[int], /) -> str:
        """Returns the text of a turn that rewards and environments of texts get."""
        ...

    def reasoning(self, ids: Sequence[int], /) -> Sequence[tuple[str, str]]:
        """Returns what `answer` leaves out of a turn: names of messages, and their texts."""
        ...

    def apply_chat_template(self, messages: Sequence[Message], /, **arguments: Any) -> str:
        """Returns a conversation as text."""
        ...


@dataclasses.dataclass(frozen=True)
class ReplyWriter:
    """Writes replies with a chat template."""

    tokenizer: TemplateTokenizer  # tokenizer of the policy
    arguments: Mapping[str, Any]  # further variables of the chat template
    calls: bool  # whether replies are those of tools; else they are messages of the user
    system: str = ""  # the system message of the conversations; '' for none

    def check(self) -> None:
        """Refuses a template that changes earlier turns, or does not end them with a token.

        Raises:
            UserError: the template does.
        """
        opening = [{"role": "user", "content": "dummy"}]
        if self.system:
            opening.insert(0, {"role": "system", "content": self.system})
        replies = self._messages(["dummy"])
        turn = self._turn(replies[0])
        conversations = [opening, [*opening, turn], [*opening, turn, *replies, turn]]
        texts = [self._render(messages) for messages in conversations]
        ids = [list(self.tokenizer.encode(text)) for text in texts]
        ends = [self._end(part) for part in ids[1:]]
        if not ends[0]:
            raise UserError(
                "the chat template does not end the assistant's turn with an end-of-sequence "
                "token, so an environment cannot answer it: take another model"
            )
        if ids[1][: len(ids[0])] != ids[0] or ids[2][: ends[0]] != ids[1][: ends[0]]:
            raise UserError(
                "the chat template writes earlier turns in another way when a conversation grows "
                "(Qwen3's drops their reasoning, Mistral's moves the system message): take an "
                "environment of tools, a model whose template keeps them, such as Qwen2.5, or no "
                "data.system_prompt"
            )
        self.write(["dummy"], _DUMMY_CALLS)

    def write(self, texts: Sequence[str], calls: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Returns the ids of a reply, from the end of the policy's turn to the next turn.

        A text is a message of the user, or the result of a call; each call has a name and an id.
        """
        return self.follow(self._messages(texts, calls))

    def follow(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of messages that follow a turn of the policy, and begin the next one.

        Raises:
            UserError: the template fails, or writes the turn in another way once it is answered.
        """
        opening = [{"role": "user", "content": "dummy"}, self._turn(messages[0])]
        before = list(self.tokenizer.encode(self._render(opening)))
        before = before[: self._end(before)]
        after = self._render([*opening, *messages], add_generation_prompt=True)
        ids = list(self.tokenizer.encode(after))
        if not before or ids[: len(before)] != before:
            raise UserError(
                "the chat template writes a turn in another way once it has been answered, so an "
                "environment cannot answer it: take another model"
            )
        return ids[len(before) :]

    def fit(
        self, texts: Sequence[str], calls: Sequence[tuple[str, str]], limit: int
    ) -> tuple[list[int], bool]:
        """Returns the ids of a reply of at most `limit` tokens, and whether a text was cut.

        [] is returned where not even empty texts fit.
        """
        short = [text[: limit * _CHARACTERS] for text in texts]
        ids = self.write(short, calls)
        if len(ids) <= limit:
            return ids, list(texts) != short
        encoded = [list(self.tokenizer.encode(text)) for text in short]
        frame = len(self.write([""] * len(texts), calls))
        share = max(0, limit - frame) // len(texts)
        while len(ids) > limit and share:
            ids = self.write([self.tokenizer.decode(part[:share]) for part in encoded], calls)
            share -= max(1, share // 8)  # A cut text may have more tokens than were kept.
        return (ids if len(ids) <= limit else []), True

    def end_id(self) -> int:
        """Returns the token that ends a turn, for one that a limit has cut off."""
        (message,) = self._messages([""])
        opening = [{"role": "user", "content": "dummy"}, self._turn(message)]
        ids = list(self.tokenizer.encode(self._render(opening)))
        return ids[self._end(ids) - 1]

    def _messages(
        self, texts: Sequence[str], calls: Sequence[tuple[str, str]] = _DUMMY_CALLS
    ) -> list[dict[str, Any]]:
        if not self.calls:
            return [{"role": "user", "content": text} for text in texts]
        return [
            {"role": "tool", "name": name, "tool_call_id": number, "content": text}
            for text, (name, number) in zip(texts, calls, strict=True)
        ]

    def _turn(self, reply: Message) -> dict[str, Any]:
        """A turn of the policy that a reply may follow; it reasons, where a template knows that."""
        if not self.calls:
            return {"role": "assistant", "content": _THOUGHT, "thinking": "dummy"}
        function = {"name": reply["name"], "arguments": {}}
        call = {"type": "function", "id": NO_ID, "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return turn | {"reasoning_content": "dummy", "thinking": "dummy"}

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, **self.arguments
        )

    def _end(self, ids: Sequence[int]) -> int:
        """The number of ids up to the last one that ends a turn; 0 without one."""
        ends = [i for i, token in enumerate(ids) if token in self.tokenizer.eos_ids]
        return ends[-1] + 1 if ends else 0
