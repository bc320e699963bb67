"""The former name of `experiments.export`, which still works."""

from qerl_jax.commands.export import main

if __name__ == "__main__":
    main()
