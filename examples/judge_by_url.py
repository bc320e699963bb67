"""A judge by URL: a server scores the completions of a rollout, and the policy learns from it.

    uv run python examples/judge_by_url.py

The judge here is a thread that says how close a sum is. Whatever answers the same POST takes its
place, on this machine or another: a reward model, a language model as a judge, a sandbox.

The mean reward was 0.69 over the first four of the 16 steps and 0.94 over the last four (one run, 4
minutes on two CPU cores that others used too).
"""

import http.server
import json
import re
import threading

import qerl_jax as qj

ADDRESS = ("127.0.0.1", 8765)


def closeness(completion, answer):
    """Returns 1 if the last number is right, 1/2 for one next to it, and so on; else 0."""
    numbers = re.findall(r"\d+", completion)
    return 1 / (1 + abs(int(numbers[-1]) - int(answer))) if numbers else 0.0


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers lists of completions and answers with the list of their rewards."""

    def do_POST(self):
        """Scores the completions of a rollout."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = list(map(closeness, asked["completions"], asked["answers"]))
        body = json.dumps({"rewards": rewards}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Prints nothing of each request."""


def main():
    """Starts the judge and trains the default model; a run that was stopped is resumed."""
    config = qj.get_config("grpo_gsm8k")
    config.experiment = "judge_by_url"
    config.update_from_flattened_dict(
        {
            "steps": 16,
            "rewards.correctness.function": "http://{}:{}/score".format(*ADDRESS),
            "eval.every": 0,
        }
    )
    server = http.server.ThreadingHTTPServer(ADDRESS, Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sums = [(a, b) for a in range(10) for b in range(10)]
    problems = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in sums]
    return qj.train(config, problems=problems)


if __name__ == "__main__":
    main()
