"""How the processes of a run find each other: from the environment, through JAX's runtime.

One process serves all devices that it sees. Plain variables name the processes, or SLURM does:

    JAX_COORDINATOR_ADDRESS=HOST:PORT   of process 0, which the others connect to
    JAX_NUM_PROCESSES=N
    JAX_PROCESS_ID=0 to N-1
    srun --ntasks=N ...                 SLURM names all three
    JAX_LOCAL_DEVICE_IDS=0,1            of this process, where it should not serve all that it sees

`connect` brings the processes together while a run lasts.
"""

import contextlib
import ipaddress
import os
import re
from collections.abc import Generator, Mapping
from typing import NamedTuple

import jax

from qerl_jax.errors import UserError, first_line, user_text
from qerl_jax.processes.abort import line_on_abort
from qerl_jax.processes.group import HEARTBEAT_SECONDS, Processes
from qerl_jax.system.signals import StoppedError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
# SLURM sets the first one for what srun starts, and not for a batch script.
_SLURM_COUNT, _SLURM_INDEX = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
_SLURM_NODES, _SLURM_JOB, _SLURM_STEP = "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"
_SLURM = _SLURM_COUNT, _SLURM_INDEX, _SLURM_NODES, _SLURM_JOB, _SLURM_STEP
_CONNECT_SECONDS = 300
_FIRST_PORT, _PORTS = 61440, 4096


class Rank(NamedTuple):
    """One process among all: HOST:PORT of process 0, their number, its own."""

    address: str
    count: int
    index: int


def read_rank(environment: Mapping[str, str], *, devices: int) -> Rank | None:
    """Returns the rank of this process by its environment, or None where it runs alone.

    A run on one device is a run of one process, so that SLURM may start several such runs at once;
    `devices` is the number of those of the run's mesh.

    Raises:
        UserError: the variables are incomplete or wrong, or name processes for a single device.
    """
    plain = {name: environment.get(name) for name in (COUNT, INDEX, ADDRESS)}
    if any(plain.values()):
        if plain[COUNT] == "1":
            return None
        missing = [name for name, value in plain.items() if not value]
        if missing:
            settings = ", ".join(f"{name}={value}" for name, value in plain.items() if value)
            raise UserError(
                f"{settings} without {' and '.join(missing)}: to start several processes set all "
                "three variables, and none of them for one process"
            )
        count, index = (_number(name, environment[name]) for name in (COUNT, INDEX))
        address = environment[ADDRESS]
        port = re.fullmatch(r".+:(\d{1,5})", address, re.ASCII)
        if port is None or not 0 < int(port[1]) < 1 << 16:  # JAX would wait for minutes.
            raise UserError(
                f"{ADDRESS}={address}: it must be HOST:PORT of process 0, a port from 1 to 65535"
            )
        if devices == 1:
            raise UserError(
                f"{COUNT}={count} with mesh.data=1 and mesh.tensor=1, which is one device: pass "
                "--config.mesh.data with the number of devices of all processes"
            )
    elif devices > 1 and _is_one_of_several(environment):
        if missing := [name for name in _SLURM if not environment.get(name)]:
            raise UserError(
                f"this process is a task of a SLURM step without {' and '.join(missing)}, which "
                f"srun sets: start it by srun, or set {COUNT}, {INDEX} and {ADDRESS}=HOST:PORT of "
                f"process 0, and {COUNT}=1 for one process"
            )
        count, index = (_number(name, environment[name]) for name in (_SLURM_COUNT, _SLURM_INDEX))
        address = _slurm_address(environment)
    else:
        return None
    if index >= count:
        raise UserError(f"process {index} of {count} processes: they are numbered from 0")
    return Rank(address, count, index)


def local_devices(environment: Mapping[str, str]) -> list[int]:
    """Returns the numbers of the devices that this process serves; [] for all that it sees.

    Raises:
        UserError: the variable does not list numbers.
    """
    numbers = environment.get(DEVICES)
    return [_number(DEVICES, number) for number in numbers.split(",")] if numbers else []


@contextlib.contextmanager
def connect(*, devices: int) -> Generator[Processes]:
    """Connects the processes of a run; an error in one of them ends all.

    A process that is lost ends the others within a minute, with a line that names it. Process 0
    speaks for all: the others write nothing to stdout.

    Args:
        devices: number of devices of the run's mesh.

    Yields:
        The processes, as this one sees them.

    Raises:
        UserError: as in `read_rank`, or the processes cannot connect.
    """
    rank = read_rank(os.environ, devices=devices)
    if rank is None:
        yield Processes()
        return
    with contextlib.ExitStack() as stack:
        with line_on_abort(lambda: f"error: {_connection_error(rank)}"):
            _initialize(rank)
        processes = Processes(rank.index, rank.count, rank.address)
        stack.enter_context(line_on_abort(processes.why_aborted))
        if rank.index:
            null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(null))
        try:
            processes.begin()
            yield processes
        except StoppedError:
            processes.end()
            raise
        except BaseException as error:
            processes.fail(error)
            if (text := user_text(error)) and processes.has_checkpoint:
                raise UserError(processes.with_command(text)) from error
            raise
        processes.end()


def _initialize(rank: Rank) -> None:
    """Connects this process to the others."""
    # JAX would take SIGTERM, which is a request to save here.
    jax.config.update("jax_enable_preemption_service", False)
    # Without it the runtime aborts all processes when one is lost, before a line can name it.
    jax.config.update("jax_enable_recoverability", True)
    # XLA warns of that choice at the start, and of lost connections at the end of every run.
    jax.config.update("jax_logging_level", "ERROR")
    devices = local_devices(os.environ)
    try:
        jax.distributed.initialize(
            rank.address,
            rank.count,
            rank.index,
            # By default a process under SLURM would use one device alone.
            local_device_ids=devices,
            initialization_timeout=_CONNECT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            coordinator_bind_address=_bind_address(rank.address, os.environ),
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{_connection_error(rank)}: {first_line(error)}") from error


def _bind_address(address: str, environment: Mapping[str, str]) -> str | None:
    """Where process 0 listens; None leaves it to JAX, which listens on all interfaces.

    Processes of one machine, which find each other at its loopback address, listen only there: what
    they exchange is neither encrypted nor authenticated.
    """
    host, _, port = address.rpartition(":")
    if environment.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return None  # JAX reads it.
    if host == "localhost":
        return f"127.0.0.1:{port}"
    try:
        return address if ipaddress.ip_address(host.strip("[]")).is_loopback else None
    except ValueError:
        return None


def _connection_error(rank: Rank) -> str:
    return (
        f"process {rank.index} of {rank.count} was not connected at {rank.address}: "
        "start all of them with the same address and different numbers, and see the lines before"
    )


def _is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether SLURM has started this process with others: each but the first has another index."""
    count, index = environment.get(_SLURM_COUNT) or "", environment.get(_SLURM_INDEX) or "0"
    return count != "1" if count else index != "0"


def _slurm_address(environment: Mapping[str, str]) -> str:
    """The first host of a SLURM step, with a port that differs between the steps of a job."""
    # Such as node7, node7,node9, node[07-12,15],gpu1, node[1-2]-ib or rack[1-2]node[1-4].
    nodes = environment[_SLURM_NODES]
    first = re.match(r"(?:[\w.-]|\[\d+[\d,-]*\])+(?=,|\Z)", nodes, re.ASCII)
    if first is None:
        raise UserError(
            f"{_SLURM_NODES}={nodes!r:.100}: it must be a list of hosts, such as node[07-12,15]"
        )
    host = re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0])
    step = _number(_SLURM_JOB, environment[_SLURM_JOB])
    step += _number(_SLURM_STEP, environment[_SLURM_STEP])
    return f"{host}:{_FIRST_PORT + step % _PORTS}"


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 10:  # A job of a federation of clusters has 10 digits.
        raise UserError(f"{name}={text:.100}: it must be a whole number")
    return int(text)
