r"""Writes peer_answers.json: what other programs read as the answer of a completion that reasons.

`completions` have the reward of TRL's `reasoning_accuracy_reward` and the text that lm-eval scores
with `think_end_token="</think>"`. `pairs` are formulas, and whether math-verify finds the second
equal to the first. `groups` are rewards, and whether TRL counts them as equal: `is_std_zero` of its
GRPOTrainer, in float64.

Needs Python 3.12, torch, trl==1.16.0, lm-eval==0.4.13 and math-verify==0.9.0:

    python tests/golden/make_peer_answers.py
"""

import json
import pathlib

import torch
from lm_eval.models.utils import postprocess_generated_text
from math_verify import parse, verify
from trl.rewards import reasoning_accuracy_reward

PATH = pathlib.Path(__file__).parent / "peer_answers.json"
# (completion, reference); all of them open the reasoning, or their template did.
COMPLETIONS = [
    (r"<think>Maybe \boxed{5}? No: check 3 + 4", "5"),
    (r"<think>Maybe <answer>5</answer>? No", "5"),
    (r"<think>First \boxed{3}. No.</think> The answer is $4$.", "3"),
    (r"<think>First \boxed{3}. No.</think> The answer is $4$.", "4"),
    (r"<think>First \boxed{3}.</think> So \boxed{4}.", "4"),
    (r"<think>First \boxed{3}.</think> So \boxed{4}.", "3"),
    (r"First \boxed{3}.</think> So \boxed{4}.", "4"),
    (r"First \boxed{3}.</think> So \boxed{4}.", "3"),
    (r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", "2"),
    (r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", "1"),
    (r"<think>\boxed{4}</think>", "4"),
    (r"<think>\boxed{4}</think> I do not know.", "4"),
    (r"<think></think>\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
]
PAIRS = [
    (r"\frac{1}{2}", r"\frac12"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "2"),
    ("x + 1", "1+x"),
    ("x + 1", "x"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("(1, 2)", "(1,2)"),
    ("(1, 2)", "(2,1)"),
]
GROUPS = [
    [0.3, 0.1 + 0.2, 0.3, 0.1 + 0.2],
    [0.7, 0.1 * 7, 0.7, 0.7],
    [1.1 + 2.2, 3.3, 3.3, 1.1 + 2.2],
    [0.3 - 0.1 - 0.2, 0.0, 0.0, 0.0],
    [1.0, 1.0, 1.0, 1.0],
    [0.0, 1e-6, 0.0, 0.0],
    [0.0, 1.0, 1.0, 0.0],
    [100.0, 100.001, 100.0, 100.0],
]


def main():
    texts, references = zip(*COMPLETIONS, strict=True)
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = reasoning_accuracy_reward(messages, [f"${reference}$" for reference in references])
    completions = [
        {
            "completion": text,
            "answer": reference,
            "trl": reward,
            "lm_eval": postprocess_generated_text(text, None, "</think>"),
        }
        for text, reference, reward in zip(texts, references, rewards, strict=True)
    ]
    pairs = [
        {"answers": [a, b], "equal": bool(verify(parse(f"${a}$"), parse(f"${b}$")))}
        for a, b in PAIRS
    ]
    groups = []
    for rewards in GROUPS:
        std = torch.tensor(rewards, dtype=torch.float64).std()
        is_zero = bool(torch.isclose(std, torch.zeros_like(std)))
        groups.append({"rewards": rewards, "equal": is_zero})
    content = {"completions": completions, "pairs": pairs, "groups": groups}
    lines = [
        f'"{name}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]"
        for name, entries in content.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
