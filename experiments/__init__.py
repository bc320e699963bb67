"""Command lines: each experiment is a docstring, a config and a main function."""

import os
import sys

from qerl_jax.commands.interrupts import end_imports_on_interrupt

# True in `python -m experiments.NAME`, which imports this package to find the module, and in an
# installed command; a program that imports this package keeps its own handling of signals.
if sys.argv and (sys.argv[0] == "-m" or os.path.basename(sys.argv[0]).startswith("qerl-")):
    end_imports_on_interrupt()
