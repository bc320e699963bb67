"""A guessing game: the policy learns to use what an environment tells it, on a CPU.

    uv run python examples/guessing_game.py
    uv run python examples/guessing_game.py --constant    # the control: replies that tell nothing

The environment has a number from 1 to 3 in mind, and the policy has two guesses. After a wrong one
it learns whether the number is higher or lower. Two different guesses are right in 2 of 3 games,
which is the best without reading the reply; 2 and then what the reply says is always right.
"""

import random
import re
import sys

import qerl_jax as qj

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gwen", "Hugo", "Iris", "Jack", "Kate", "Liam"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
QUESTION = "Guess the number of {name} on {day}: 1, 2 or 3?"


class GuessingGame:
    """An environment of texts: `reset` begins a game, and `step` takes a guess."""

    def reset(self, seed):
        """Begins a game; games of the same seed have the same number."""
        self.number = random.Random(seed).randint(1, 3)

    def step(self, text):
        """Returns what the environment says, the reward, and whether the game is over."""
        match = re.search(r"[123]", text)
        if match is None:
            return "write 1, 2 or 3", 0.0, False
        if int(match[0]) == self.number:
            return "right", 1.0, True
        return self.hint(int(match[0])), 0.1, False  # a little for a number at all

    def hint(self, guess):
        """Returns what is said after a wrong guess."""
        return "higher" if guess < self.number else "lower"


class ConstantGame(GuessingGame):
    """The control: the same game with a reply that tells nothing."""

    def hint(self, guess):
        """Returns the same text after every guess."""
        return "wrong"


def main(constant):
    """Trains the default model; a run that was stopped goes on."""
    config = qj.get_config("grpo_gsm8k")
    config.experiment = "constant_game" if constant else "guessing_game"
    config.update_from_flattened_dict(
        {
            "steps": 30,
            "environment.function": f"guessing_game:{'Constant' if constant else 'Guessing'}Game",
            "environment.max_turns": 2,
            "environment.turn_tokens": 5,
            "environment.reply_tokens": 20,
            "rollout.prompts_per_step": 4,
            "rollout.max_new_tokens": 10,
            "rollout.chunk_steps": 4,
            "data.question_suffix": "",
            "rewards.correctness.function": "qerl_jax.rewards.functions:environment_reward",
            "rewards.format.weight": 0.0,
            "optimizer.learning_rate": 1e-3,
            "eval.every": 15,
            "eval.problems": 28,
        }
    )
    questions = [QUESTION.format(day=day, name=name) for day in DAYS for name in NAMES]
    return qj.train(config, problems=[{"question": text, "answer": ""} for text in questions])


if __name__ == "__main__":
    main("--constant" in sys.argv[1:])
