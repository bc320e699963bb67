"""What the commands do: train, evaluate, sample, show, export, quantize, plan, sweep."""

import os
import sys

from qerl_jax.commands.interrupts import end_imports_on_interrupt

# True in `python -m`, which imports the package of a module to find it, and in an installed
# command; a program that imports this package keeps its own handling of signals.
if sys.argv and (sys.argv[0] == "-m" or os.path.basename(sys.argv[0]).startswith("qerl-")):
    end_imports_on_interrupt()
