"""The command as a process: help, version, a reader that goes away, `python -m infer`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infer.cli import loading
from infer.cli.main import main

ROOT = Path(__file__).parents[2]


def infer(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)  # type: ignore


def test_help_lists_the_commands_and_no_more(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
    commands = "generate chat pull models info convert quantize bench eval"
    assert listed == commands.split()


def test_python_m():
    done = infer("no-such-command")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "infer: No such command 'no-such-command'. (see infer --help)\n"


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "infer", "models"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    assert "Exception" not in done.stderr


def test_compilation_cache_is_set_up_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("INFER_CACHE", "/cache")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "9")
    monkeypatch.setenv("INFER_NO_COMPILE_CACHE", "1")
    loading.use_compilation_cache()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    monkeypatch.delenv("INFER_NO_COMPILE_CACHE")
    loading.use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/cache/xla"
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "9"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/mine")
    loading.use_compilation_cache()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/mine"


BUSY = """
import dataclasses, signal, sys, threading, types
# A shell's background job ignores SIGINT, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
import infer
from infer.cli.main import run
def busy(*args, **kwargs):
    print("busy", flush=True)
    threading.Event().wait(60)
infer.load = lambda *args, **kwargs: types.SimpleNamespace(generate=busy)
infer.SamplingParams = dataclasses.make_dataclass("P", ["temperature", "max_tokens"])
sys.argv = ["infer", "generate", "x", "--model", "m"]
run()
"""


def test_ctrl_c_during_a_long_program():
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "busy\n"
            start = time.perf_counter()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert time.perf_counter() - start < 10
    assert (process.returncode, out, err) == (130, "", "")
