"""A taskset of verifiers with two turns of a user; the other interpreter imports it."""

import verifiers.v1 as vf

__all__ = ["TwoTurns", "TwoTurnsEnv"]


class Data(vf.TaskData):
    second: str


class Task(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))

    @vf.metric
    async def branches(self, trace: vf.Trace) -> float:
        return float(len(trace.branches))


class Config(vf.TasksetConfig):
    second: str = "And 2 + 2?"


class TwoTurns(vf.Taskset[Task, Config]):
    INFINITE = True

    def load(self):
        while True:
            yield Task(Data(prompt=None, name="sums", second=self.config.second), self.config.task)


class TwoTurnsEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for text in ("What is 1 + 1?", task.data.second):
                if (await interaction.turn(text)).terminated:
                    break
