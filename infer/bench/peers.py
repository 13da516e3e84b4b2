"""Peers as long-lived processes: started once, asked in turns, silent in between."""

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.bench.machine import busy_cores

_SCRIPTS = Path(__file__).resolve().parent / "peer_side"

# OpenMP workers that sleep between steps: measured as fast as spinning ones for llama.cpp, whose
# barriers are its own; torch would lose a fifth to a third.
_SLEEPING = {"peer_llama_cpp.py": {"OMP_WAIT_POLICY": "passive"}}

# What `--against` can name -> (script, the peer's dtype, label).
KINDS = {
    "llama.cpp": [("peer_llama_cpp.py", None, "llama.cpp")],
    "transformers": [
        ("peer_transformers.py", "float32", "transformers f32"),
        ("peer_transformers.py", "bfloat16", "transformers bf16"),
    ],
}

# Cores that other work may take while engines are compared; more is a busy machine.
QUIET_CORES = 0.2


class PeerError(RuntimeError):
    """A peer cannot be started or has answered with an error."""


class NoPeersError(ValueError):
    """There is no environment of peers where one was looked for."""


@dataclass
class Peer:
    """One peer's process.

    Attributes:
        label: its name in reports.
        start_s: from starting the process to the loaded model, imports included.
        load_s: of the model alone.
        info: what it says about itself.
        version: of the library.
        details: what else tells how it was built and how it runs.
    """

    label: str
    process: subprocess.Popen
    start_s: float = 0.0
    load_s: float = 0.0
    info: str = ""
    version: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(
        cls, python: Path, script: str, dtype: str | None, label: str, path: Path, threads: int
    ) -> "Peer":
        """Start the process and load the model."""
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment |= _SLEEPING.get(script, {})
        begin = time.perf_counter()
        process = subprocess.Popen(
            [str(python), str(_SCRIPTS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        peer = cls(label, process)
        options = {} if dtype is None else {"dtype": dtype}
        answer = peer.ask("load", path=str(path), threads=threads, **options)
        peer.start_s = time.perf_counter() - begin
        peer.load_s, peer.info = answer["load_s"], answer["info"]
        peer.version = answer["version"]
        peer.details = answer.get("details", {})
        return peer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and return its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(
                f"{self.label} ended with status {self.process.wait()}; run {self.process.args} "
                "by hand to see why"
            )
        answer = json.loads(line)
        if not answer.pop("ok"):
            raise PeerError(f"{self.label}: {answer['error']}")
        return answer

    def settle(self, most_s: float = 2.0) -> float:
        """Wait until the process burns no more CPU; return the seconds that took.

        OpenMP workers spin for a while after a step: a peer's turn ends when they sleep.
        """
        begin = time.perf_counter()
        before = _cpu_seconds(self.process.pid)
        while time.perf_counter() - begin < most_s:
            time.sleep(0.1)
            now = _cpu_seconds(self.process.pid)
            if now - before < 0.005:
                break
            before = now
        return time.perf_counter() - begin

    def idle_cpu_share(self, seconds: float = 0.5) -> float:
        """Return the share of one core that the waiting process takes; 0 is what it should be."""
        before = _cpu_seconds(self.process.pid)
        time.sleep(seconds)
        return (_cpu_seconds(self.process.pid) - before) / seconds

    def close(self) -> None:
        """End the process by closing its input."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def python_of(folder: Path) -> Path:
    """Return the interpreter of the peers' environment.

    Raises:
        NoPeersError: there is none in `folder`.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        raise NoPeersError(
            f"{folder} has no environment of peers; in a checkout of the sources run: bash "
            f"scripts/peers.sh {folder}"
        )
    return python


def _cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience: float) -> float:
    """Wait up to `patience` seconds for an idle machine; return the cores busy at the end."""
    end = time.perf_counter() + patience
    while (busy := busy_cores()) > QUIET_CORES and time.perf_counter() < end:
        time.sleep(1.0)
    return busy
