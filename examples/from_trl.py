"""Three example scripts of TRL as runs here: a game, a database to ask, and GSM8K.

    uv run --extra cuda python examples/from_trl.py game
    uv run --extra cuda python examples/from_trl.py database
    uv run --extra cuda python examples/from_trl.py gsm8k

They do what examples/scripts/grpo_2048.py, grpo_agent.py and grpo_continuous_batching.py of
huggingface/trl do at commit f2cd57710ae3, written anew. The genes here are made up, so that the
database needs no download. docs/from_trl.md counts the lines of TRL's scripts that had to change.
"""

import argparse
import itertools
import random
import re
import sqlite3

import qerl_jax as qj

MODULE = "examples.from_trl"  # by which the processes of environments import their tools
GAME = "Play 2048 on a board of 4 by 4. Call the tool `move` until the game is over."
DATABASE = (
    "The SQLite table interactions(gene_a, gene_b) has genes that were seen to interact. Use the "
    "tool `query`, and end with *yes* or *no*. Does the gene {a} interact with {b}?"
)
TUTOR = "Solve the problem step by step. The last line is #### and the number."
GENES = ["JNKK", "MAPKK4", "TP53", "MDM2", "BRCA1", "BARD1", "EGFR", "GRB2"]
INTERACTIONS = list(itertools.pairwise(GENES))


class Game2048:
    """An environment with a tool: TRL's contract, so that a class for TRL runs as it is."""

    def reset(self):
        """Begins a game; the text that it returns is added to the prompt."""
        self.cells, self.score, self.done = [0] * 16, 0.0, False
        self._spawn()
        self._spawn()
        return self._board()

    def move(self, direction: str) -> str:
        """Makes a move.

        Args:
            direction: one of up, down, left, right.
        """
        if self.done:
            raise ValueError("the game is over")
        before = list(self.cells)
        for line in self._lines(direction.strip().lower()):
            tiles = [self.cells[i] for i in line if self.cells[i]]
            merged = []
            while tiles:
                tile = tiles.pop(0)
                if tiles and tiles[0] == tile:
                    tile += tiles.pop(0)
                    self.score += tile
                merged.append(tile)
            for place, tile in zip(line, merged + [0] * (4 - len(merged)), strict=True):
                self.cells[place] = tile
        if self.cells != before:
            self._spawn()
        pairs = [(i, i + 1) for i in range(16) if i % 4 < 3] + [(i, i + 4) for i in range(12)]
        self.done = all(self.cells) and all(self.cells[a] != self.cells[b] for a, b in pairs)
        return self._board()

    def _lines(self, direction):
        """The places of each line, the first one being where tiles move to."""
        rows = [list(range(start, start + 4)) for start in (0, 4, 8, 12)]
        columns = [list(range(start, 16, 4)) for start in range(4)]
        lines = {"left": rows, "right": rows, "up": columns, "down": columns}[direction]
        return [line[::-1] for line in lines] if direction in ("right", "down") else lines

    def _spawn(self):
        place = random.choice([i for i, tile in enumerate(self.cells) if not tile])
        self.cells[place] = random.choice([2, 2, 2, 4])

    def _board(self):
        rows = [self.cells[start : start + 4] for start in (0, 4, 8, 12)]
        text = "\n".join(" ".join(f"{tile:4d}" for tile in row) for row in rows)
        return f"{text}\nscore {self.score:.0f}{', game over' if self.done else ''}"


def game_score(environments):
    """The score that each game ended with."""
    return [one.score for one in environments]


def query(sql_command: str) -> list:
    """Executes a query of SQL on the table interactions.

    Args:
        sql_command: the query.
    """
    with sqlite3.connect(":memory:") as connection:
        connection.execute("create table interactions(gene_a, gene_b)")
        connection.executemany("insert into interactions values (?, ?)", INTERACTIONS)
        connection.execute("pragma query_only = on")
        return connection.execute(sql_command).fetchall()


def right_answer(completions, answers):
    """Whether the last turn says *yes* or *no*, and the right one."""
    said = [re.search(r"\*(yes|no)\*", text.lower()) for text in completions]
    pairs = zip(said, answers, strict=True)
    return [-0.5 if not match else 0.6 if match[1] == right else -1.0 for match, right in pairs]


def evidence(conversations, answers):
    """Whether few, specific queries found what the answer says."""
    rewards = []
    for messages, right in zip(conversations, answers, strict=True):
        calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
        queries = [str(call["arguments"].get("sql_command", "")).lower() for call in calls]
        results = [m["content"] for m in messages if m["role"] == "tool"]
        rows = [row for found in results if isinstance(found, list) for row in found]
        has_failed = any(isinstance(found, str) for found in results)  # A result is a list.
        specific = sum(" where " in text for text in queries)
        reward = 0.4 * min(specific, 3) - 0.5 * (len(queries) - specific)
        reward -= 1.5 * (len(queries) > 3) + 2.0 * has_failed
        supported = bool(queries) and not has_failed and bool(rows) == (right == "yes")
        rewards.append(reward + (2.0 if supported else -1.5))
    return rewards


def last_number(completions, answers):
    """Whether the number after #### is the answer."""
    found = [re.search(r"####\s*([\d,]+)", text) for text in completions]
    pairs = zip(found, answers, strict=True)
    return [float(bool(match) and match[1].replace(",", "") == right) for match, right in pairs]


def play(config, **options):
    """Trains on games of 2048: grpo_2048.py."""
    config.environment.function = f"{MODULE}:Game2048"
    problems = [{"question": GAME}] * 1000
    return qj.train(config, problems=problems, rewards={"score": game_score}, **options)


def ask(config, **options):
    """Trains on questions about a database: grpo_agent.py."""
    config.environment.function = f"{MODULE}:query"
    known = {frozenset(pair) for pair in INTERACTIONS}
    problems = [
        {"question": DATABASE.format(a=a, b=b), "answer": "yes" if {a, b} in known else "no"}
        for a in GENES
        for b in GENES
        if a != b
    ]
    rewards = {"correctness": right_answer, "evidence": evidence}
    return qj.train(config, problems=problems, rewards=rewards, **options)


def solve(config, **options):
    """Trains on GSM8K, the data of the config: grpo_continuous_batching.py."""
    config.data.system_prompt, config.data.question_suffix = TUTOR, ""
    return qj.train(config, rewards=last_number, **options)


SCRIPTS = {
    "game": ("qwen3-4b", play),
    "database": ("qwen3-1.7b", ask),
    "gsm8k": ("qwen3-1.7b", solve),
}


def main():
    """Trains with the defaults of TRL's GRPOConfig, and the settings of its scripts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", choices=SCRIPTS)
    model, run = SCRIPTS[parser.parse_args().script]
    config = qj.get_config(f"{model},trl")
    config.update_from_flattened_dict(
        {
            "steps": 400,
            "optimizer.learning_rate": 1e-5,  # of an adapter
            "data.chat_template_args": {"enable_thinking": False},
            "data.max_prompt_tokens": 1024,
            "rollout.max_new_tokens": 1024,
            "eval.every": 0,
        }
    )
    if run is not solve:
        config.environment.max_turns, config.environment.reply_tokens = 12, 128
    run(config)


if __name__ == "__main__":
    main()
