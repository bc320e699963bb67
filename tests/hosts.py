"""Two hosts on one machine, for `test_hosts`: network namespaces with a cable between them.

Each host has a name, a network, mounts and a home folder of its own. The namespaces have no names
in the file system: they belong to processes that the kernel ends with pytest, however it dies, and
are gone with the last of them.
"""

import datetime
import os
import pathlib
import shutil
import subprocess
import time

import numpy as np
import tiny_run

_CABLE, _BALLAST = "cable", "ballast"
_PORT = 9876
_PER_HOST = 2
_OWN = "--net", "--uts", "--mount"  # namespaces of a host
_WITH_PYTEST = "setpriv", "--pdeathsig", "KILL"  # lets the kernel end a process with this one
_COMMANDS = "unshare", "nsenter", "setpriv", "ip", "mount"


def why_not():
    """Why this machine has no such hosts; '' if it has."""
    if os.geteuid():
        return "two hosts on one machine need root, for network namespaces"
    trial = f"ip link add {_CABLE} type veth peer name other && mount -t tmpfs other /mnt"
    try:
        command = [*_WITH_PYTEST, "unshare", *_OWN, "sh", "-c", trial]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"two hosts on one machine need the commands {', '.join(_COMMANDS)}: {error}"
    return done.stderr.strip().replace("\n", " ")


class Host:
    """A host, whose processes have its network, name, mounts and folders."""

    def __init__(self, name, address, folder, *, setup, sees=None):
        """Starts the process that keeps the namespaces.

        Args:
            name: its name.
            address: its IPv4 address.
            folder: an empty folder, which a disk of its own is mounted at.
            setup: a shell command that runs in it at first.
            sees: the host whose mounts it sees as well.
        """
        self.name, self.address, self.folder = name, address, folder
        begin = [] if sees is None else sees.enter("--mount")
        mount = f"mount -t tmpfs -o size=256m {name} {folder} && mkdir {folder}/tmp"
        script = f"hostname {name} && ip link set lo up && {mount} && {setup} && echo ready"
        script += " && exec sleep infinity"
        self.holder = subprocess.Popen(
            [*_WITH_PYTEST, *begin, "unshare", *_OWN, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.holder.stdout.readline() == "ready\n"

    def enter(self, *namespaces):
        """The words before a command that runs it in this host."""
        return ["nsenter", f"--target={self.holder.pid}", *namespaces, "--"]

    def command(self, words):
        """The words of a command that runs in this host, and ends with pytest."""
        return [*_WITH_PYTEST, *self.enter(*_OWN), *words]

    def ip(self, *words):
        subprocess.run([*self.enter("--net"), "ip", *words], check=True)

    def path(self, path):
        """A path of this host as pytest sees it."""
        return pathlib.Path(f"/proc/{self.holder.pid}/root{path}")

    def fill(self, path, *, free=0):
        """Fills the disk at a path but for some bytes."""
        with (self.path(path) / _BALLAST).open("wb", buffering=0) as file:
            space = os.statvfs(file.fileno())
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - free)


class Hosts:
    """Two hosts with a disk that both see at `shared`, and the runs that are started on them."""

    def __init__(self, folder):
        self.folder, self.shared = folder, folder / "shared"
        names = folder / "names"
        for path in (self.shared, folder / "node1", folder / "node2"):
            path.mkdir()
        names.write_text("127.0.0.1 localhost\n10.0.0.1 node1\n10.0.0.2 node2\n")
        setup = f"mount --bind {names} /etc/hosts"
        shared = f"mount -t tmpfs -o size=256m shared {self.shared}"
        first = Host("node1", "10.0.0.1", folder / "node1", setup=f"{setup} && {shared}")
        second = Host("node2", "10.0.0.2", folder / "node2", setup=setup, sees=first)
        self.hosts = [first, second]
        pid = str(second.holder.pid)
        first.ip("link", "add", _CABLE, "type", "veth", "peer", "name", _CABLE, "netns", pid)
        for host in self.hosts:
            host.ip("addr", "add", f"{host.address}/24", "dev", _CABLE)
            host.ip("link", "set", _CABLE, "up")
        self.started = []

    def unplug(self):
        self.hosts[1].ip("link", "set", _CABLE, "down")

    def plug(self):
        self.hosts[1].ip("link", "set", _CABLE, "up")

    def empty(self):
        """Empties the disks of what `fill` has written."""
        for host in self.hosts:
            for path in (host.folder, self.shared):
                (host.path(path) / _BALLAST).unlink(missing_ok=True)

    def kill(self):
        """Ends all processes of runs."""
        for process in [p for run in self.started for p in run.processes.values()]:
            process.kill()
            process.wait()

    def run(self, command, environment, **own):
        """A run of the command in two processes of each host; `own` has variables of processes."""
        run = Started(self, command, environment, own)
        self.started.append(run)
        return run

    def close(self):
        self.kill()
        for host in self.hosts:
            host.holder.kill()
            host.holder.wait()
            host.holder.stdout.close()


class Started:
    """Four processes of a run on two hosts, and what they said."""

    def __init__(self, hosts, command, environment, own):
        self._hosts, self._command, self._own = hosts, command, own
        self._environment = environment
        self._number = len(hosts.started)
        self.processes = {}

    def start(self, *numbers):
        """Starts processes by their numbers; 0 and 1 are on the first host."""
        for number in numbers:
            host = self._hosts.hosts[number // _PER_HOST]
            home = host.folder
            own = {
                "JAX_COORDINATOR_ADDRESS": f"node1:{_PORT}",
                "JAX_NUM_PROCESSES": str(_PER_HOST * len(self._hosts.hosts)),
                "JAX_PROCESS_ID": str(number),
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": f"{home}/programs",
                "HOME": str(home),
                "XDG_CONFIG_HOME": f"{home}/.config",
                "XDG_CACHE_HOME": f"{home}/.cache",
                "TMPDIR": f"{home}/tmp",
            }
            with self._file(number).open("w") as file:
                self.processes[number] = subprocess.Popen(
                    host.command(self._command),
                    env=self._environment | own | self._own.get(f"of_{number}", {}),
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
        return self

    def wait(self, seconds):
        """The exit codes by number of the process; raises where one runs for longer."""
        ends = time.monotonic() + seconds
        return {
            number: process.wait(max(0.0, ends - time.monotonic()))
            for number, process in self.processes.items()
        }

    def said(self, number):
        return self._file(number).read_text()

    def all_said(self):
        """What all processes said, for an assertion that fails."""
        return "\n".join(f"--- {number}\n{self.said(number)}" for number in self.processes)

    def errors(self, number):
        return [line for line in self.said(number).splitlines() if line.startswith("error: ")]

    def until(self, happened, seconds=240):
        ends = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < ends, self.all_said()
            assert all(p.poll() is None for p in self.processes.values()), self.all_said()
            time.sleep(0.02)

    def _file(self, number):
        return self._hosts.folder / f"said-{self._number}-{number}"


# --- What the processes of the runs call ----------------------------------------------------------

# With HOSTS_PAUSE='rollout N:PATH' or 'update N:PATH' in the environment, a process creates the
# file in the Nth step that it takes, and waits until the file is removed.


def reward(prompt, completion, answer, num_tokens, finished):
    """As `tiny_run.rare`; it may pause, and then the other processes wait for its completions."""
    _pause(f"rollout {_taken[0] + 1}")
    return tiny_run.rare(prompt, completion, answer, num_tokens, finished)


def advantages(rewards, parts):
    """The rewards less their mean; it may pause, and then the others wait for its gradient."""
    if not all(np.array_equal(part, rewards) for part in parts.values()):  # no trial call
        _taken[0] += 1
        _pause(f"update {_taken[0]}")
    return rewards - np.mean(rewards, axis=1, keepdims=True)


def _pause(point):
    wanted, _, path = os.environ.get("HOSTS_PAUSE", "").partition(":")
    if wanted == point and not _paused:
        _paused.append(point)
        pathlib.Path(path).touch()
        while os.path.exists(path):
            time.sleep(0.01)


_taken, _paused = [0], []  # updates that this process began, and where it has paused


def set_up():
    """Gives a process what a host has and namespaces lack, before it imports the project.

    HOSTS_CLOCK moves the clock of Python by a number of seconds, as namespaces share that of the
    machine. With HOSTS_QUOTA a disk seems to have space, as one with a quota of the user does.
    """
    if os.environ.get("HOSTS_QUOTA"):
        usage = shutil.disk_usage(os.sep)
        shutil.disk_usage = lambda path: usage._replace(free=10**12)
    shift = float(os.environ.get("HOSTS_CLOCK", "0"))
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + shift
    time.time_ns = lambda: nanoseconds() + int(1e9 * shift)

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

    datetime.datetime = Shifted
