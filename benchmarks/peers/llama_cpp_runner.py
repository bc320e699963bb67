"""Runs a GGUF file in llama.cpp, in an environment with llama-cpp-python alone.

    python llama_cpp_runner.py JOB.json OUT.npz

JOB has `model`, `lora` or null, and `texts`: lists of token ids, or strings, of which llama.cpp's
tokenizer makes ids0, ids1 ... The first `scored` texts (default: all) get their float32 logits
[T, V] as text0, text1 ... With `new` above 0 every text is continued greedily by at most `new`
tokens, new0, new1 ..., of which the last one may end the turn. `threads` are 1 unless they are
given, because threads that wait for each other spin, which is slow on busy cores. The texts are
decoded together. Weights are repacked for the CPU only with `repack`: for one with AMX, whose code
stops the process where an older GCC built it (llama.cpp's issue 20824).
"""

import ctypes
import itertools
import json
import sys
import time

import llama_cpp  # pyrefly: ignore[missing-import]
import numpy as np

_ROWS = 200  # llama.cpp allows 256 sequences.
_SCORED = 256  # tokens whose logits are computed at once


class Decoder:
    """A model with an adapter and the texts of a job; its rows are sequences 0, 1 ... to it."""

    def __init__(self, job: dict):
        llama_cpp.llama_log_set(_quiet, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = job.get("repack", False)
        self.model = llama_cpp.llama_model_load_from_file(job["model"].encode(), options)
        if not self.model:
            raise SystemExit(f"{job['model']}: llama.cpp does not load it")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.width = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.texts = [self._encode(t) if isinstance(t, str) else t for t in job["texts"]]
        self.rows = min(_ROWS, len(self.texts)) if job["new"] else 1
        options = llama_cpp.llama_context_default_params()
        options.n_seq_max = self.rows
        length = max(map(len, self.texts)) + job["new"]
        options.n_ctx = self.rows * (-(-length // 256) * 256)
        options.n_batch = options.n_ubatch = max(512, self.rows)
        options.n_threads = options.n_threads_batch = job.get("threads", 1)
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if job["lora"]:
            adapter = llama_cpp.llama_adapter_lora_init(self.model, job["lora"].encode())
            if not adapter:
                raise SystemExit(f"{job['lora']}: llama.cpp does not load it")
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            llama_cpp.llama_set_adapters_lora(self.context, adapters, 1, (ctypes.c_float * 1)(1.0))
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)

    def _encode(self, text: str) -> list[int]:
        """Tokenizes a text that may hold special tokens; nothing is put before it."""
        encoded = text.encode()
        ids = (llama_cpp.llama_token * (len(encoded) + 8))()
        count = llama_cpp.llama_tokenize(
            self.vocab, encoded, len(encoded), ids, len(ids), False, True
        )
        return ids[:count]

    def decode(self, tokens, positions, rows, wanted: slice) -> np.ndarray:
        """Decodes tokens of rows; returns the logits of those that are wanted."""
        self.batch.n_tokens = len(tokens)
        for i, (token, position, row) in enumerate(zip(tokens, positions, rows, strict=True)):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, row
            self.batch.logits[i] = 0
        found = range(len(tokens))[wanted]
        for i in found:
            self.batch.logits[i] = 1
        if llama_cpp.llama_decode(self.context, self.batch):
            raise SystemExit("llama.cpp could not decode")
        logits = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (len(found), self.width))

    def read(self, text: list[int], row: int, *, begin: int = 0, scored: bool) -> np.ndarray:
        """Reads a text from token `begin`; returns its logits, or those of its last token alone."""
        found = []
        for start in range(begin, len(text), _SCORED):
            part = text[start : start + _SCORED]
            positions = range(start, start + len(part))
            wanted = slice(0 if scored else len(part) - 1, None)
            found.append(self.decode(part, positions, [row] * len(part), wanted).copy())
        return np.concatenate(found) if scored else found[-1]

    def forget(self, row: int) -> None:
        """Empties a row."""
        llama_cpp.llama_memory_seq_rm(self.memory, row, -1, -1)

    def copy(self, row: int, to: int) -> None:
        """Makes another row equal to a row."""
        llama_cpp.llama_memory_seq_cp(self.memory, row, to, -1, -1)

    def ends(self, token: int) -> bool:
        """Whether a token ends a turn."""
        return llama_cpp.llama_vocab_is_eog(self.vocab, token)


@llama_cpp.llama_log_callback
def _quiet(level, text, data):
    del level, text, data


def begin(decoder: Decoder, texts: list[list[int]], scored: int) -> tuple[list[int], list]:
    """Reads each text into a row; returns the likeliest next tokens, and the logits of the first.

    Where no logits are wanted, the tokens that all texts share are read once.
    """
    firsts, logits = [], []
    columns = () if scored else zip(*(text[:-1] for text in texts), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    if shared:
        decoder.read(texts[0][:shared], 0, scored=False)
        for row in range(1, len(texts)):
            decoder.copy(0, row)
    for row, text in enumerate(texts):
        found = decoder.read(text, row, begin=shared, scored=row < scored)
        firsts.append(int(found[-1].argmax()))
        if row < scored:
            logits.append(found)
    return firsts, logits


def complete(
    decoder: Decoder, texts: list[list[int]], firsts: list[int], new: int
) -> list[list[int]]:
    """Continues the texts of rows, given the first new token of each; returns the new tokens."""
    tokens = [[token] for token in firsts]
    live = list(range(len(texts)))  # the text of each row
    for step in range(1, new + 1):
        # llama.cpp decodes rows with consecutive numbers together: the last one fills a gap.
        for row in reversed(range(len(live))):
            if step == new or decoder.ends(tokens[live[row]][-1]):
                decoder.forget(row)
                last = live.pop()
                if row < len(live):
                    decoder.copy(len(live), row)
                    decoder.forget(len(live))
                    live[row] = last
        if not live:
            break
        ends = [tokens[text][-1] for text in live]
        positions = [len(texts[text]) + len(tokens[text]) - 1 for text in live]
        logits = decoder.decode(ends, positions, range(len(live)), slice(None))
        for text, token in zip(live, logits.argmax(axis=1), strict=True):
            tokens[text].append(int(token))
    return tokens


def main(job_file: str, out_file: str) -> None:
    """Runs the job of a file."""
    with open(job_file) as file:
        job = json.load(file)
    start = time.time()
    decoder, new = Decoder(job), job["new"]
    texts, rows = decoder.texts, decoder.rows
    scored = job.get("scored", len(texts))
    found = {f"ids{number}": np.array(text) for number, text in enumerate(texts)}
    found["version"] = np.array(llama_cpp.__version__)
    for first in range(0, len(texts) if new else scored, rows):
        part = texts[first : first + rows]
        firsts, logits = begin(decoder, part, max(0, min(len(part), scored - first)))
        found |= {f"text{first + row}": own for row, own in enumerate(logits)}
        if not new:
            decoder.forget(0)
            continue
        print(f"{time.time() - start:.0f} s: {len(part)} texts are read", flush=True)
        answers = complete(decoder, part, firsts, new)
        found |= {f"new{first + row}": np.array(own) for row, own in enumerate(answers)}
        count = sum(map(len, answers))
        print(f"{time.time() - start:.0f} s: {count} tokens are written", flush=True)
    np.savez(out_file, allow_pickle=False, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
