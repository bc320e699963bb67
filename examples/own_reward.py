"""Your own reward: the policy learns to answer with a single word, on a CPU.

    uv run python examples/own_reward.py

A reward is a function of a completion. This one needs no answers, so a problem is a question alone.

The mean reward was 0.05 in the first step and 1.00 in the last of 12 (one run, 2 minutes on two CPU
cores). The reward asks for a word and not for a right one, and that is what it gets: in the end an
answer to "Name a river on a map." was `ocean`.
"""

import re

import qerl_jax as qj

THINGS = ["bird", "fruit", "color", "city", "country", "tree", "river", "metal", "planet", "tool"]
PLACES = ["in a song", "in a book", "on a map", "in a garden", "at school", "in a film"]


def one_word(prompt, completion, answer, num_tokens, finished):
    """Returns 1 for one word, 1/2 for two, and so on; 0 where the completion did not end."""
    words = re.findall("[A-Za-z]+", completion)
    return 1.0 / len(words) if finished and words else 0.0


def main():
    """Trains the default model; a run that was stopped is resumed."""
    config = qj.get_config("grpo_gsm8k")
    config.experiment = "one_word"
    config.update_from_flattened_dict(
        {
            "steps": 12,
            "rollout.prompts_per_step": 4,
            "data.examples": (),
            "optimizer.learning_rate": 1e-3,
            "eval.every": 0,
        }
    )
    questions = [f"Name a {thing} {place}." for thing in THINGS for place in PLACES]
    problems = [{"question": question, "answer": ""} for question in questions]
    return qj.train(config, problems=problems, rewards=one_word)


if __name__ == "__main__":
    main()
