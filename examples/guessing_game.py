"""A guessing game: the policy learns to use what an environment tells it, on a CPU.

    uv run python examples/guessing_game.py --seed=0
    uv run python examples/guessing_game.py --constant    # the control: replies that tell nothing

The environment has a number from 1 to 3 in mind, and the policy has two guesses. After a wrong one
it learns whether the number is higher or lower. Two different guesses are right in 2 of 3 games,
which is the best without reading the reply; 2 and then what the reply says is always right.
"""

import argparse
import re

import qerl_jax as qj

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gwen", "Hugo", "Iris", "Jack", "Kate", "Liam"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
QUESTION = "Guess the number of {name} on {day}: 1, 2 or 3?"


class GuessingGame:
    """An environment of texts: `reset` begins a game, and `step` takes a guess."""

    def reset(self, answer):
        """Begins a game about the number that is the answer of the problem."""
        self.number = int(answer)

    def step(self, text):
        """Returns what the environment says, the reward, and whether the game is over.

        Only a game that is won pays, and the same after one guess as after two. A reward for a
        guess that is wrong would make it better to lose the first guess on purpose.
        """
        match = re.search(r"[123]", text)
        if match is None:
            return "write 1, 2 or 3", 0.0, False
        if int(match[0]) == self.number:
            return "right", 1.0, True
        return self.hint(int(match[0])), 0.0, False

    def hint(self, guess):
        """Returns what is said after a wrong guess."""
        return "higher" if guess < self.number else "lower"


class ConstantGame(GuessingGame):
    """The control: the same game with a reply that tells nothing."""

    def hint(self, guess):
        """Returns the same text after every guess."""
        return "wrong"


def problems():
    """Returns games: each question with each number, so that no question tells its number.

    The last game of a question is the one that may be held out for evaluations. Its number moves on
    from question to question, so that of 27 held-out games 9 have each number.
    """
    questions = [QUESTION.format(day=day, name=name) for day in DAYS for name in NAMES]
    return [
        {"question": question, "answer": str((index + turn) % 3 + 1)}
        for index, question in enumerate(questions)
        for turn in range(3)
    ]


def main():
    """Trains the default model; a run that was stopped is resumed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--constant", action="store_true", help="replies that tell nothing")
    arguments = parser.parse_args()
    config = qj.get_config("grpo_gsm8k")
    config.experiment = "constant_game" if arguments.constant else "guessing_game"
    game = ConstantGame if arguments.constant else GuessingGame
    config.update_from_flattened_dict(
        {
            "seed": arguments.seed,
            "steps": 24,
            "environment.function": f"examples.guessing_game:{game.__name__}",
            "environment.max_turns": 2,
            "environment.turn_tokens": 1,
            "environment.reply_tokens": 20,
            "rollout.max_new_tokens": 2,
            "rollout.chunk_steps": 1,
            "data.max_prompt_tokens": 80,
            "rewards.correctness.function": "qerl_jax.rewards.functions:environment_reward",
            "rewards.format.weight": 0.0,
            "optimizer.learning_rate": 1e-3,
            "eval.every": 24,
            "eval.problems": 27,
        }
    )
    return qj.train(config, problems=problems())


if __name__ == "__main__":
    main()
