"""Rounds, ratios and ranges with engines that stand in; a peer's process and its errors."""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from infer import native
from infer.bench import compare, machine, ours, peers
from infer.bench.cases import DecodeCase
from tests.models import tiny

DECODE = DecodeCase(batch=1, prompt_tokens=8, new_tokens=3)
PREFILL = DecodeCase(batch=1, prompt_tokens=8, new_tokens=1)
IDS = list(range(1, 40))


def timing(ttft_s: float, decode_s: float = 1.0, tokens=((1, 2, 3),)) -> ours.Timing:
    return ours.Timing(ttft_s=ttft_s, decode_s=decode_s, tokens=[list(row) for row in tokens])


def test_engines_take_turns_and_the_first_round_is_not_counted():
    calls = []

    def engine(name):
        def run(prompts, new_tokens):
            calls.append(name)
            return timing(float(len(calls)))

        return run

    found = compare.run_rounds({"a": engine("a"), "b": engine("b")}, [DECODE], IDS, rounds=2)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert [t.ttft_s for t in found["decode_b1"]["a"]] == [3.0, 6.0]


def test_each_turn_is_told():
    lines = []
    engine = lambda prompts, new_tokens: timing(1.0)
    compare.run_rounds({"a": engine}, [DECODE, PREFILL], IDS, rounds=1, say=lines.append)
    assert [line.rsplit(": ", 1)[0] for line in lines] == [
        "warm-up, decode_b1, a",
        "warm-up, prefill, a",
        "round 1 of 1, decode_b1, a",
        "round 1 of 1, prefill, a",
    ]
    assert (compare.counted(1, "round"), compare.counted(2, "round")) == ("1 round", "2 rounds")


def test_ratios_are_of_each_round():
    mine = [timing(0.1, 1.0), timing(0.1, 2.0), timing(0.2, 1.0)]
    theirs = [timing(0.2, 2.0), timing(0.2, 2.0), timing(0.2, 4.0, [(1, 2, 4)])]
    row = compare.case_figures(DECODE, {"ours": mine, "them": theirs})
    assert row["ratios"]["them"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert row["tokens_per_s"]["ours"] == {"median": 2.0, "min": 1.0, "max": 2.0}
    assert row["equal_leading_tokens"]["them"] == 2
    row = compare.case_figures(PREFILL, {"ours": mine, "them": theirs})
    assert row["ratios"]["them"] == {"median": 2.0, "min": 1.0, "max": 2.0}
    assert row["tokens_per_s"]["them"]["median"] == 40.0


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (PREFILL, "prefill"),
        (DecodeCase(batch=2, prompt_tokens=8, new_tokens=1), "prefill_b2"),
        (DecodeCase(batch=32, prompt_tokens=8, new_tokens=2), "decode_b32"),
    ],
)
def test_names_of_cases(case: DecodeCase, name: str):
    assert compare.name_of(case) == name


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of peers whose llama.cpp is ten lines of Python."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    real = Path(peers.__file__).parent / "peer_side" / "peer_protocol.py"
    shutil.copy(real, scripts / "peer_protocol.py")
    (scripts / "peer_llama_cpp.py").write_text(
        "from peer_protocol import serve\n"
        "def load(path, threads):\n"
        "    print('noise of a library')\n"
        "    return {'load_s': 0.5, 'info': f'{threads} threads', 'version': '1',\n"
        "            'details': {'cache': 'f16'}}\n"
        "def generate(prompts, new_tokens):\n"
        "    if new_tokens == 99: raise ValueError('too many')\n"
        "    return {'ttft_s': 0.5, 'decode_s': 0.25 * new_tokens,\n"
        "            'tokens': [[7] * new_tokens for _ in prompts]}\n"
        "def speculate(prompts, new_tokens, k):\n"
        "    if k < 0: return generate(prompts, new_tokens)\n"
        "    return generate(prompts, new_tokens) | dict(drafted=k, accepted=1, row_passes=3)\n"
        "serve({'load': load, 'generate': generate, 'speculate': speculate})\n"
    )
    monkeypatch.setattr(peers, "_SCRIPTS", scripts)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def test_a_peer_answers_through_its_pipe(scripted: Path):
    with compare.started_peers(["llama.cpp"], scripted, Path("model.gguf"), 2) as (peer,):
        assert (peer.load_s, peer.info, peer.details) == (0.5, "2 threads", {"cache": "f16"})
        run = compare.engine_of_peer(peer)
        assert run([[1, 2]], 4) == timing(0.5, 1.0, [(7, 7, 7, 7)])
        assert 1e6 < peer.ask("memory")["peak_bytes"] < 1e9
        with pytest.raises(peers.PeerError, match=r"llama\.cpp: ValueError: too many"):
            peer.ask("generate", prompts=[[1]], new_tokens=99)
        found = peer.speculate([[1, 2], [3]], 2, 4)
        assert (found["drafted"], found["accepted"], found["row_passes"]) == (4, 1, 3)
        with pytest.raises(peers.PeerError, match=r"'speculate'.*'drafted' is None, not a count"):
            peer.speculate([[1]], 2, -1)
        peer.process.kill()
        with pytest.raises(peers.PeerError, match=r"ended with status -9; run /.*/bin/python /"):
            peer.ask("generate", prompts=[[1]], new_tokens=2)


def test_starts_are_told(scripted: Path):
    lines = []
    with compare.started_peers(["llama.cpp"], scripted, Path("m.gguf"), 1, say=lines.append):
        first, second = lines
    assert first == "llama.cpp: starts and loads m.gguf"
    assert second.startswith("llama.cpp: ready after ")


GOOD_LOAD = '{"ok": true, "load_s": 1, "info": "", "version": "1"}'


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start peers whose script is given, note their processes, and end what is left of them."""
    processes = []
    popen = peers.subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr(peers, "_SCRIPTS", tmp_path)
    monkeypatch.setattr(peers.subprocess, "Popen", noted)

    def start(script: str, timeout_s: float = 20.0) -> peers.Peer:
        (tmp_path / "peer.py").write_text(script)
        return peers.Peer.start(
            Path(sys.executable), "peer.py", None, "peer", tmp_path, 1, timeout_s
        )

    start.processes = processes  # type: ignore[attr-defined]
    yield start
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def says(*lines: str) -> str:
    """Return a script that answers each request with the next line, whatever it is."""
    return f"for line in {lines!r}:\n    input(); print(line, flush=True)"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (says("not JSON"), "'load' with what is no answer: it says b'not JSON"),
        (says("[" * 100_000), "'load' with what is no answer"),
        (says("9" * 5000), "'load' with what is no answer"),
        (says("[1]"), "'load' with what is no answer"),
        (says("{}"), "'load' with what is no answer"),
        (says('{"ok": 1}'), "'load' with what is no answer"),
        (says('{"ok": true}'), "'load_s' is None, not a number of seconds"),
        (says(GOOD_LOAD.replace("1,", "true,")), "'load_s' is True, not a number of seconds"),
        (says(GOOD_LOAD.replace("1,", "NaN,")), "'load_s' is nan, not a number of seconds"),
        (says(GOOD_LOAD.replace("1,", f"{10**400},")), "not a number of seconds"),
        (says(GOOD_LOAD.replace('""', "7")), "'info' is 7, not a string"),
        (says(GOOD_LOAD.replace('"1"}', '"1", "details": 5}')), "'details' is 5, not an object"),
        (says('{"ok": false}'), "peer: an error without a word"),
        ("raise SystemExit(3)", "peer ended with status 3; run "),
    ],
)
def test_a_load_that_fails_is_one_error_and_leaves_no_process(
    started: Any, script: str, message: str
):
    with pytest.raises(peers.PeerError) as caught:
        started(script)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500
    (process,) = started.processes
    assert process.returncode is not None
    assert process.stdin.closed and process.stdout.closed


@pytest.mark.parametrize(
    "answer",
    [
        '{"ok": true}',
        '{"ok": true, "ttft_s": 1, "decode_s": 1, "tokens": [[1, 2, 3]]}',
        '{"ok": true, "ttft_s": 1, "decode_s": 1, "tokens": [[1, 2], [1, true]]}',
        '{"ok": true, "ttft_s": 0, "decode_s": 1, "tokens": [[1, 2], [1, 2]]}',
        '{"ok": true, "ttft_s": 1, "decode_s": 0, "tokens": [[1, 2], [1, 2]]}',
        '{"ok": true, "ttft_s": 1, "decode_s": "1", "tokens": [[1, 2], [1, 2]]}',
    ],
)
def test_a_run_that_is_none_is_an_error(started: Any, answer: str):
    peer = started(says(GOOD_LOAD, answer))
    with pytest.raises(peers.PeerError, match="with what is no answer"):
        peer.generate([[1], [2]], 2)
    peer.close()


HELD = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', 'import time; "


@pytest.mark.parametrize(
    "script",
    ["import time; time.sleep(600)", HELD + "time.sleep(600)'])"],
    ids=["silent", "a child holds the pipe"],
)
def test_a_silent_peer_is_ended(started: Any, script: str):
    with pytest.raises(
        peers.PeerError, match=r"has not answered 'load' within 0\.5 s and was ended; give it"
    ):
        started(script, timeout_s=0.5)
    assert started.processes[0].returncode == -signal.SIGKILL


def test_a_peer_that_reads_nothing_is_ended(started: Any):
    peer = started(says(GOOD_LOAD) + "\nimport time; time.sleep(600)")
    peer.timeout_s = 0.5
    with pytest.raises(peers.PeerError, match=r"has not answered 'generate' within 0\.5 s"):
        peer.generate([list(range(100_000))], 2)
    peer.close()


def test_a_peer_that_does_not_end_is_ended(started: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "_GRACE_S", 0.2)
    peer = started(says(GOOD_LOAD) + "\nimport time; time.sleep(600)")
    peer.close()
    assert peer.process.returncode == -signal.SIGKILL


def test_a_python_that_cannot_be_run(scripted: Path):
    python = scripted / "bin" / "python"
    python.unlink()
    for make in (lambda: python.mkdir(), lambda: (python.rmdir(), python.write_text("#!/none"))):
        make()
        with (
            pytest.raises(peers.PeerError, match=r"python cannot be run.*scripts/peers\.sh"),
            compare.started_peers(["llama.cpp"], scripted, Path("m.gguf"), 1),
        ):
            pass


def test_measure_has_the_ratios_and_the_bandwidth_at_the_top(
    scripted: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    with compare.started_peers(["llama.cpp"], scripted, Path("model.gguf"), 1) as started:
        found = compare.measure(tiny.llama(), IDS, [PREFILL, DECODE], started, rounds=2, threads=1)
    assert found["against"] == "llama.cpp"
    case = found["cases"]["decode_b1"]
    assert found["ratio_decode_b1"] == case["ratios"]["llama.cpp"]["median"] > 0
    low, high = found["ranges"]["ratio_prefill"]
    assert low <= found["ratio_prefill"] <= high
    # 2 tokens after the first, in 0.75 s.
    assert case["tokens_per_s"]["llama.cpp"]["median"] == pytest.approx(2 / 0.75)
    rate, bandwidth = case["tokens_per_s"]["ours"], found["read_bandwidth"]
    low, high = found["ranges"]["bandwidth_fraction"]
    assert case["bytes_a_step"] == ours.step_bytes(tiny.llama(), DECODE)
    assert low >= case["bytes_a_step"] * rate["min"] / bandwidth["max"] * (1 - 1e-9)
    assert high <= case["bytes_a_step"] * rate["max"] / bandwidth["min"] * (1 + 1e-9)
    ran = "native" if native.by_default() else "xla"
    assert found["ours"]["implementations"]["paged_attention"] == ran
    text = compare.text_of({"model": "tiny", **found})
    assert ", 1 thread, 2 rounds\n" in text
    assert "float32 cache" in text and text.splitlines()[2].endswith("cache: f16")
    assert "at batch 1 a step reads 0 MB" in text
    few = found | {"model": "tiny", "ours": found["ours"] | {"native": "avx2", "native_threads": 1}}
    assert compare.text_of(few).splitlines()[1].endswith("native operations: avx2, 1 thread")
    off = found | {"model": "tiny", "ours": found["ours"] | {"native": "-", "native_threads": None}}
    assert compare.text_of(off).splitlines()[1].endswith("native operations: -")
    assert "llama.cpp 1: 1 threads" in text


def test_the_cache_has_the_dtype_that_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    params = tiny.llama()
    found = compare.measure(params, IDS, [DECODE], [], rounds=1, threads=1, kv_dtype="bfloat16")
    assert found["ours"]["cache"] == "bfloat16"
    config = params.config
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * round(DECODE.context)
    assert ours.step_bytes(params, DECODE) - found["cases"]["decode_b1"]["bytes_a_step"] == 2 * kv


def test_native_operations_that_are_switched_off_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("INFER_NATIVE", "0")
    found = ours.describe(tiny.llama())
    assert (found["native"], found["native_threads"]) == ("INFER_NATIVE is 0", None)


def test_bytes_of_packed_weights_count_as_packed():
    config = tiny.llama_config()
    params = tiny.llama()
    shape = ours.model_shape(params)
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert ours.step_bytes(params, DECODE) == shape.weight_bytes + kv * round(DECODE.context)


def test_read_bandwidth_is_over_all_parts():
    memory = machine.ReadBandwidth(2, num_bytes=1 << 20)
    assert [part.nbytes for part in memory._parts] == [1 << 19, 1 << 19]
    assert memory.measure() > 0


@pytest.mark.parametrize("count", [0, 10**6])
def test_threads_that_are_not_there(count: int):
    with pytest.raises(ValueError, match=rf"threads is {count}; this process may use 1 to"):
        machine.use_threads(count)
