"""The record of a run while it trains, which the loop hands on."""

import dataclasses
import time

from qerl_jax.compile.count import Compilations
from qerl_jax.run.checkpoints import Checkpoints
from qerl_jax.run.folder import OpenRun
from qerl_jax.run.metrics import MetricsLog
from qerl_jax.system.live_line import LiveLine
from qerl_jax.training.setup import Setup
from qerl_jax.training.step import Progress


@dataclasses.dataclass
class Run:
    """A run while it trains.

    Attributes:
        setup: the parts that do not change.
        folder: the open run folder.
        checkpoints: saves `progress`.
        log: writes the rows of metrics; None in a process that writes nothing.
        progress: the part that the steps change.
        evaluations: greedy accuracy by step, as logged, None where scores are missing; step 0 is
            before training.
        problem_digests: digests of the training and the held-out problems.
        prompts_digest: digest of their prompts as token ids.
        compilations: what was compiled since the last row of metrics.
        live: the line of progress on the terminal.
        adapter_step: step of the adapter that this process wrote last, -1 before the first one.
        picture_time: when the curves were drawn last, or the run began, by `time.monotonic`.
    """

    setup: Setup
    folder: OpenRun
    checkpoints: Checkpoints
    log: MetricsLog | None
    progress: Progress
    evaluations: dict[int, float | None]
    problem_digests: dict[str, str]
    prompts_digest: str
    compilations: Compilations
    live: LiveLine = dataclasses.field(default_factory=LiveLine)
    adapter_step: int = -1
    picture_time: float = dataclasses.field(default_factory=time.monotonic)

    def stop_if_asked(self) -> None:
        """Raises a StoppedError once a signal has arrived, in any process of the run."""
        self.setup.processes.stop_if_asked()
