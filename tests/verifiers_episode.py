"""Runs an episode of verifiers 0.4 against a server, and prints its branches as JSON.

    PYTHON verifiers_episode.py BASE_URL KEY TOKENIZER_FOLDER train|eval

verifiers has a process of its own: it is installed where PYTHON is, with the taskset `GUESS`.
"""

import asyncio
import json
import os
import sys

GUESS = """
import verifiers.v1 as vf

__all__ = ["GuessTaskset"]


class GuessData(vf.TaskData):
    answer: str


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> list[GuessTask]:
        data = GuessData(idx=0, prompt="What number is in the box? Use the tool.", answer="7")
        return [GuessTask(data, self.config.task)]
"""


async def main(url, key, tokenizer, kind):
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils.generic import concrete_type

    os.environ["POLICY_KEY"] = key
    options = {"base_url": url, "api_key_var": "POLICY_KEY"}
    client = EvalClientConfig(**options)
    if kind == "train":
        renderer = {"renderer": {"name": "qwen3"}, "renderer_model_name": tokenizer}
        client = TrainClientConfig(**options, **renderer)
    agent = {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    config = concrete_type(SingleAgentEnv, EnvConfig).model_validate(
        {"taskset": {"id": "guess"}, "agent": agent}
    )
    env = SingleAgentEnv(config)
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=64)
    context = ModelContext(model="policy", client=client, sampling=sampling)
    async with env.serving():
        episode = await env.run_episode(env.taskset.load()[0], context)
    branches = [
        {
            "ids": list(branch.token_ids),
            "mask": [int(sampled) for sampled in branch.sampled_mask],
            "logprobs": list(branch.logprobs),
            "reward": trace.reward,
        }
        for trace in episode.traces
        for branch in trace.branches
    ]
    print("BRANCHES " + json.dumps(branches))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
