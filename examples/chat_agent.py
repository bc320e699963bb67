"""An agent with a tool, which knows the policy as a chat endpoint of OpenAI's form.

    uv run python examples/chat_agent.py --seed=0
    uv run python examples/chat_agent.py --control    # rewards by a coin toss

`solve` is the agent. It is any program that talks to an endpoint: here a loop over HTTP, which
tells or shows the policy how the calculator is called, and answers its calls. The reward is half
for a call with the numbers of the question, and half for the right answer after it.
"""

import argparse
import random
import re

import httpx2

import qerl_jax as qj

CALL = re.compile(r"<calculate>\s*(\d+) \+ (\d+)\s*</calculate>")
SYSTEM = (
    "Never calculate yourself. Answer a question such as 'What is 1 + 2?' with <calculate>1 + 2"
    "</calculate>. A calculator replies with the sum; then answer with the number alone."
)
TURNS = [
    *("What is 21 + 4?", "<calculate>21 + 4</calculate>", "25", "25"),
    *("What is 30 + 18?", "<calculate>30 + 18</calculate>", "48", "48"),
]
EXAMPLES = [
    {"role": "assistant" if number % 2 else "user", "content": text}
    for number, text in enumerate(TURNS)
]


async def solve(base_url, api_key, question, examples=False):
    """Answers a question with a calculator, and returns the reward and two facts."""
    first, second = re.findall(r"\d+", question)
    before = EXAMPLES if examples else [{"role": "system", "content": SYSTEM}]
    messages, called, answer = [*before, {"role": "user", "content": question}], False, ""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=None) as client:
        for _ in range(2):
            body = {"model": "policy", "messages": messages}
            response = await client.post("chat/completions", json=body)
            answer = response.raise_for_status().json()["choices"][0]["message"]["content"]
            call = CALL.search(answer)
            if call is None:
                break
            called |= call.groups() == (first, second)
            result = str(int(call[1]) + int(call[2]))
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": result},
            ]
    right = called and answer.strip() == str(int(first) + int(second))
    return {"reward": (called + right) / 2, "called": called, "right": right}


async def toss(base_url, api_key, question, examples=False):
    """The control: the same agent, whose reward has nothing to do with what the policy did."""
    coin = random.Random(api_key).random() < 0.5  # The sessions of a group have one seed.
    return await solve(base_url, api_key, question, examples) | {"reward": float(coin)}


def problems(*, examples):
    """Returns sums of two numbers from 10 to 49, and whether the agent shows solved examples."""
    pairs = [(a, b) for a in range(10, 50) for b in range(10, 50) if (a + b) % 7 == 0]
    random.Random(0).shuffle(pairs)
    return [{"question": f"What is {a} + {b}?", "examples": examples} for a, b in pairs]


def main():
    """Trains the default model, on a CPU; the same command resumes a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder, GGUF file or hub id; '': the default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--control", action="store_true", help="rewards by a coin toss")
    arguments = parser.parse_args()
    config = qj.get_config("grpo_gsm8k:qwen2.5-coder-1.5b" if arguments.model else "grpo_gsm8k")
    config.experiment = "chat_agent_control" if arguments.control else "chat_agent"
    if arguments.model:
        config.model.source = arguments.model
    config.update_from_flattened_dict(
        {
            "seed": arguments.seed,
            "model.calibration": "none",  # The first step comes sooner.
            "steps": arguments.steps,
            "environment.agent": f"examples.chat_agent:{'toss' if arguments.control else 'solve'}",
            "environment.turn_tokens": 48 if arguments.model else 20,
            "environment.context_tokens": 160,
            "rollout.max_new_tokens": 96 if arguments.model else 40,
            "rollout.prompts_per_step": 8 if arguments.model else 4,
            "rollout.temperature": 0.8,
            "rollout.chunk_steps": 8,
            "data.max_prompt_tokens": 192,
            "data.examples": (),
            "rewards.correctness.function": "qerl_jax.rewards.functions:environment_reward",
            "rewards.format.weight": 0.0,
            "data.system_prompt": "",
            "optimizer.learning_rate": 1e-4 if arguments.model else 3e-4,
            "eval.every": 0,
        }
    )
    return qj.train(config, problems=problems(examples=not arguments.model))


if __name__ == "__main__":
    main()
