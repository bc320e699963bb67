"""The former name of `python -m benchmarks.rollout`, which measures how fast rollouts are."""

if __name__ == "__main__":
    from benchmarks.rollout.__main__ import main

    main()
