"""Where a token of a completion comes from, and what ends a row."""

# Roles of the tokens of a completion, int8; 0 is past its end.
SAMPLED, ENVIRONMENT = 1, 2

# What ends a row with an environment, int8 as an index.
ENDINGS = ("", "answer", "done", "turns", "tokens", "context", "failure")
# answer: the policy ended a turn without a call; done: the environment is done. Both are ends by
# itself. The others are the limits on turns, sampled tokens and all tokens, and a failure of the
# environment, which leaves the row without the environment's reward.
OPEN, ANSWER, DONE, TURNS, TOKENS, CONTEXT, FAILURE = range(len(ENDINGS))
