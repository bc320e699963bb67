"""A training whose command sees two GPUs that are CPUs, for `test_spawn`."""

import os
import sys

from experiments import grpo_gsm8k
from qerl_jax.processes import spawn

spawn.uses_gpus = lambda: True
spawn._number_of_gpus = lambda: 2
spawn._END_SECONDS = 3

if __name__ == "__main__":
    if "--fails" in sys.argv and os.environ.get("JAX_PROCESS_ID") == "1":
        sys.exit("process 1 has no memory")
    sys.argv = [argument for argument in sys.argv if argument != "--fails"]
    grpo_gsm8k.main()
