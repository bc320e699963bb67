"""Writes harmony.json: turns of gpt-oss, and the messages that openai-harmony reads in them.

Each case has `text`, what follows `<|start|>assistant`, and `messages`: channel, recipient and text
of each, '' where a message has none.

Needs openai-harmony==0.0.8 with TIKTOKEN_ENCODINGS_BASE=FOLDER, which has o200k_base.tiktoken:

    python tests/golden/make_harmony.py
"""

import json
import pathlib

from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

CALL = '<|message|>{"a": 1, "b": [2, "x\\n"]}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Two and two.\nSo 4.<|end|><|start|>assistant"
TURNS = [
    "<|channel|>final<|message|>It is 4.<|return|>",
    f"{THOUGHT}<|channel|>final<|message|>It is 4.<|return|>",
    f"{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json{CALL}",
    f"{THOUGHT}<|channel|>commentary to=functions.add<|constrain|>json{CALL}",
    f"{THOUGHT} to=functions.add<|channel|>commentary json{CALL}",
    f"{THOUGHT} to=functions.look_up<|channel|>commentary <|constrain|>json{CALL}",
    f"<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant to=functions.add{CALL}",
    f"<|channel|>analysis to=functions.add code{CALL}",
    "<|channel|>analysis to=python code<|message|>print(2 + 2)<|call|>",
    f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>A<|end|><|start|>assistant<|channel|>final"
    "<|message|>B<|return|>",
    "<|channel|>analysis<|message|>a <|channel|>final<|message|> of b<|end|>",
    "<|channel|>final<|message|>cut off",
    "<|channel|>analysis<|message|>cut off",
    "<|message|>no channel<|return|>",
    "<|channel|>final<|message|><|return|>",
    "<|channel|>final<|message|>é < 4 > 2 <think>x</think> <|return|>",
]


def main():
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    cases = []
    for text in TURNS:
        ids = encoding.encode(text, allowed_special="all")
        messages = encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
        found = [[m.channel or "", m.recipient or "", m.content[0].text] for m in messages]
        cases.append({"text": text, "messages": found})
    ends = sorted(encoding.stop_tokens_for_assistant_actions())
    facts = {"end_tokens": [encoding.decode([end]) for end in ends], "cases": cases}
    path = pathlib.Path(__file__).with_name("harmony.json")
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
