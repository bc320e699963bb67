"""On a GPU, a resumed run computes the same bits: cuDNN attention, bfloat16, other processes."""

import json
import signal
import subprocess
import sys
import time

import jax
import ml_dtypes
import pytest
import tiny_checkpoints
import tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]

CHANGES = {
    "model.dtype": "bfloat16",
    "steps": 7,
    "checkpoint.every": 3,
    "rl.updates_per_rollout": 2,
    "train.recompute": "all",
    "rollout.prompts_per_step": 8,
    "data.max_prompt_tokens": 1100,
    "rollout.max_new_tokens": 40,
    "rollout.chunk_steps": 16,
    "eval.every": 0,
}


def test_steps_after_the_checkpoint_repeat_bit_for_bit(tmp_path):
    tiny = tiny_run.write_tiny(tmp_path, tmp_path / "compile_cache")
    architecture = tiny_checkpoints.model_config(
        embed_dim=512, mlp_dim=1024, num_heads=8, num_kv_heads=2, head_dim=64, max_position=2048
    )
    tensors = tiny_checkpoints.random_tensors(architecture)
    tensors = {
        name: (tensor.astype("float32") * 0.05).astype(ml_dtypes.bfloat16)
        for name, tensor in tensors.items()
    }
    tiny_checkpoints.write_folder(tiny.model, architecture, tensors)
    tiny_checkpoints.write_tokenizer(tiny.model, chat_template=tiny_run.TEMPLATE)
    # Long rows: several tiles of attention add up to each gradient.
    words = " ".join(f"t{i % 40}" for i in range(1000))
    tiny.problems.write_text(
        "".join(json.dumps({"question": f"t{i} {words}", "answer": "1"}) + "\n" for i in range(24))
    )
    run = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "experiments.grpo_gsm8k", f"--workdir={run}"),
        f"--config={tiny.config_file(tmp_path / 'config.py', CHANGES)}",
    ]
    environment = tiny.environment() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def results():
        path = run / "metrics.jsonl"
        return tiny_run.results(run) if path.exists() else []

    process = subprocess.Popen(command, env=environment)
    while len(results()) < 6 and process.poll() is None:
        time.sleep(0.01)
    # Step 6 is logged, and its checkpoint is perhaps not whole.
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = results()
    for checkpoint in (run / "checkpoints").glob("6*"):
        checkpoint.rename(run / f"unused-{checkpoint.name}")
    # Without another cache the run has its own programs, and compiles none of its steps.
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "another_cache")}
    resumed = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    assert "\ncompiled 0 of " in resumed.stdout
    for first, again in zip(before[3:6], results()[3:6], strict=True):
        differ = {name: (first[name], again[name]) for name in first if first[name] != again[name]}
        assert not differ
    assert len(results()) == 7
