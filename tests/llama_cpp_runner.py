"""Runs a GGUF file in llama.cpp, in an environment with llama-cpp-python alone.

    python llama_cpp_runner.py JOB.json OUT.npz

JOB has `model`, `lora` or null, `texts`: lists of token ids, `new`: how many tokens continue each
text greedily, and `template`: whether the tokenizer's ids of `strings` are wanted. OUT gets float32
logits [T, V] of each text as text0, text1 ..., the tokens as new0, new1 ... and ids0, ids1 ...
"""

import json
import sys

import llama_cpp
import numpy as np


def main(job_file, out_file):
    with open(job_file) as file:
        job = json.load(file)
    longest = max(map(len, job["texts"])) + job["new"]
    model = llama_cpp.Llama(
        job["model"],
        lora_path=job["lora"],
        n_ctx=longest + 8,
        n_batch=longest + 8,
        n_threads=1,  # Threads that wait for each other spin, which is slow on busy cores.
        n_threads_batch=1,
        logits_all=True,
        verbose=False,
    )
    found = {}
    for number, text in enumerate(job["texts"]):
        model.reset()
        model.eval(text)
        found[f"text{number}"] = np.array(model.scores[: len(text)], np.float32)
        tokens = []
        while len(tokens) < job["new"]:
            tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            if llama_cpp.llama_vocab_is_eog(model._model.vocab, tokens[-1]):
                break
            model.eval(tokens[-1:])
        found[f"new{number}"] = np.array(tokens, np.int32)
    for number, string in enumerate(job.get("strings", ())):
        ids = model.tokenize(string.encode(), add_bos=False, special=True)
        found[f"ids{number}"] = np.array(ids, np.int32)
    np.savez(out_file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
