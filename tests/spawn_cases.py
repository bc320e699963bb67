"""A training whose command sees two GPUs that are CPUs, for `test_spawn`."""

import os
import sys

from experiments import grpo_gsm8k
from qerl_jax.processes import spawn

spawn.number_of_gpus = lambda: 2

if __name__ == "__main__":
    if "--fails" in sys.argv:
        spawn._LOST_SECONDS = 3
    if "--fails" in sys.argv and os.environ.get("JAX_PROCESS_ID") == "1":
        sys.exit("process 1 has no memory")
    sys.argv = [argument for argument in sys.argv if argument != "--fails"]
    grpo_gsm8k.main()
