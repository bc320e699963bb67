"""The scripts of docs/several_gpus.md: each starts the processes of one run, and no others.

The schedulers are played by their variables, and `uv` by a program that records how it is called.
"""

import functools
import json
import os
import pathlib
import re
import stat
import subprocess
import sys
import textwrap

import pytest
import yaml

from benchmarks import card_tables, tables
from qerl_jax.commands import sweep
from qerl_jax.config.overrides import check_overrides
from qerl_jax.policy.architectures import ARCHITECTURES
from qerl_jax.processes.launch import Rank, read_rank

PAGE = (pathlib.Path(__file__).resolve().parents[1] / "docs/several_gpus.md").read_text()
GPUS = 16  # of both machines
RECORD = """\
#!{python}
import json, os, sys
with open(f"{{os.environ['RECORDS']}}/{{os.getpid()}}", "w") as file:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, file)
"""
# Fields of a task of SkyPilot and of its resources (docs.skypilot.co, SkyPilot YAML).
SKYPILOT = {
    *("name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts"),
    *("setup", "run", "config", "service"),
}
# Options of sbatch that take a value.
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-task", "cpus-per-task", "time", "signal"),
    "open-mode",
}


def block(section):
    """The first indented block of a section of the page, without the indentation."""
    text = PAGE.partition(f"\n### {section}\n")[2]
    return textwrap.dedent(re.search(r"(?:^    .*\n|^\n(?=    ))+", text, re.M)[0]).lstrip("\n")


@pytest.fixture
def called(tmp_path):
    """Runs a script with variables, and returns the calls of uv and srun in it."""
    for name in ("uv", "srun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(RECORD.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    numbers = iter(range(100))

    def run(script, variables):
        records = tmp_path / f"records-{next(numbers)}"
        records.mkdir()
        kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        path = f"{tmp_path}/bin:/usr/bin:/bin"
        environment = kept | {"PATH": path, "RECORDS": str(records)} | variables
        subprocess.run(["bash", "-euc", script], env=environment, check=True, timeout=60)
        return [json.loads(file.read_text()) for file in sorted(records.iterdir())]

    return run


def config_of(call):
    """The config of a recorded call, which the command accepts."""
    words = call["argv"]
    arguments = words[words.index("-m") + 2 :]
    flags = [word for word in arguments if word.startswith("--config")]
    config = sweep._parse(flags)
    check_overrides(config, {flag.partition("=")[0][9:]: None for flag in flags[1:]})
    assert [word for word in arguments if word not in flags] == ["--workdir=/shared/runs/7b"]
    assert words[words.index("-m") + 1] == "experiments.grpo_gsm8k"
    assert config.mesh.data * config.mesh.tensor == GPUS
    return config


def check(calls, count, address):
    """The calls are those of all processes of a run."""
    config = config_of(calls[0])
    assert all(call["argv"] == calls[0]["argv"] for call in calls)
    devices = config.mesh.data * config.mesh.tensor
    ranks = [read_rank(call["env"], devices=devices) for call in calls]
    assert sorted(ranks) == [Rank(address, count, index) for index in range(count)]


def test_sbatch_starts_a_process_for_each_gpu(called):
    script = block("SLURM")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.M))
    assert script.startswith("#!/bin/bash\n")
    assert script.count("#SBATCH") == len(options)
    assert options.keys() <= SBATCH
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    assert nodes * tasks * int(options["gpus-per-task"]) == GPUS
    (step,) = called(script, {"SLURM_JOB_ID": "7"})
    assert step["argv"][:2] == ["uv", "run"]
    variables = {
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_ID": "0",
    }
    calls = [
        step | {"env": step["env"] | variables | {"SLURM_PROCID": str(number)}}
        for number in range(nodes * tasks)
    ]
    check(calls, nodes * tasks, "node1:61447")


def test_one_line_starts_a_process_for_each_gpu(called):
    line = block("One line on each machine")
    calls = [call for rank in ("0", "1") for call in called(line, {"NODE_RANK": rank})]
    check(calls, GPUS, "node1:9876")
    gpus = [int(call["env"]["CUDA_VISIBLE_DEVICES"]) for call in calls]
    assert sorted(gpus) == sorted(2 * list(range(8)))


def test_a_job_of_kubernetes_starts_a_process_on_each_machine(called):
    service, job = yaml.safe_load_all(block("Kubernetes"))
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    name, count = job["metadata"]["name"], spec["completions"]
    # The first pod has the name JOB-0.SERVICE, also before it is ready.
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == count
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # those of a job
    (container,) = pod["containers"]
    assert count * container["resources"]["limits"]["nvidia.com/gpu"] == GPUS
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["shared"] == "/shared"
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert all(isinstance(value, str) for value in variables.values())
    indices = [variables | {"JOB_COMPLETION_INDEX": str(number)} for number in range(count)]
    calls = [call for index in indices for call in called(script, index)]
    check(calls, count, f"{name}-0.{pod['subdomain']}:9876")


def test_a_task_of_skypilot_starts_a_process_on_each_machine(called):
    task = yaml.safe_load(block("SkyPilot"))
    assert task.keys() <= SKYPILOT
    count = task["num_nodes"]
    _, gpus = task["resources"]["accelerators"].split(":")
    assert count * int(gpus) == GPUS
    assert list(task["volumes"]) == ["/shared"]
    addresses = [f"10.0.0.{number}" for number in range(1, count + 1)]
    variables = {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NUM_NODES": str(count)}
    ranks = [variables | {"SKYPILOT_NODE_RANK": str(number)} for number in range(count)]
    calls = [call for rank in ranks for call in called(task["run"], rank)]
    check(calls, count, "10.0.0.1:9876")


# --- Figures --------------------------------------------------------------------------------------

ADAPTER = functools.partial(card_tables.gradient_bytes, rank=32)


def test_the_gradient_between_hosts_is_what_the_devices_send():
    """The parts that each device sends, counted one by one, and the rings of the sums."""
    model = ARCHITECTURES["qwen2.5-7b"]
    targets = tuple(tables.models.lora_targets("qwen2.5-7b"))
    numbers = 80_740_352  # of an adapter of rank 32
    sent = sum(
        4 * numbers / 16  # a part of the sum
        for device in range(16)
        for other in range(16)
        if device < 8 <= other
    )
    ring = 15 * 4 * numbers / 16  # all parts but the last, once
    found = ADAPTER(model, data=16, tensor=1, targets=targets)
    assert found == pytest.approx(sent + ring)
    # Where two devices share the weights, each has about half of the gradient.
    cut = ADAPTER(model, data=8, tensor=2, targets=targets)
    assert 0.5 * found < cut < found


def test_the_completions_between_hosts_are_what_the_processes_read():
    shares = [1000.0] * 16
    read = sum(
        share for reader in range(8, 16) for number, share in enumerate(shares) if number != reader
    )
    assert card_tables.exchange_bytes(sum(shares), 16) == pytest.approx(read)


def test_the_mesh_of_the_page_is_the_first_that_the_plan_accepts():
    """72B in bf16 does not fit two GPUs of 80 GB; the page has four."""
    (cell,) = re.findall(r"^\| qwen2\.5-72b \|(?:[^|]*\|){2} (\d+ x \d+),", PAGE, re.M)
    assert cell == "4 x 4"
