"""The former name of `experiments.export`, which still works."""

from experiments.export import main

if __name__ == "__main__":
    main()
