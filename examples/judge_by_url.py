"""A judge by URL: a server scores the completions of a rollout, and the policy learns from it.

    uv run python examples/judge_by_url.py

The judge is a process of its own, here a small one that compares a text with the answer. Whatever
answers the same POST takes its place: a reward model, a language model as a judge, a sandbox.
"""

import difflib
import http.server
import json
import multiprocessing

import qerl_jax as qj

ADDRESS = ("127.0.0.1", 8765)


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers lists of completions and answers with the list of their rewards."""

    def do_POST(self):
        """Scores a rollout by the similarity of each completion and its answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pairs = zip(asked["completions"], asked["answers"], strict=True)
        rewards = [difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs]
        body = json.dumps({"rewards": rewards}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Prints nothing of each request."""


def serve():
    """Serves the judge until the process is ended."""
    http.server.ThreadingHTTPServer(ADDRESS, Judge).serve_forever()


def main():
    """Starts the judge and trains the default model; a run that was stopped goes on."""
    config = qj.get_config("grpo_gsm8k")
    config.experiment = "judge_by_url"
    config.update_from_flattened_dict(
        {
            "steps": 12,
            "rollout.prompts_per_step": 4,
            "rewards.correctness.function": "http://{}:{}/score".format(*ADDRESS),
            "rewards.format.weight": 0.0,
            "optimizer.learning_rate": 1e-3,
            "eval.every": 0,
        }
    )
    judge = multiprocessing.get_context("spawn").Process(target=serve, daemon=True)
    judge.start()
    try:
        sums = [
            {"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)
        ]
        return qj.train(config, problems=sums)
    finally:
        judge.terminate()


if __name__ == "__main__":
    main()
