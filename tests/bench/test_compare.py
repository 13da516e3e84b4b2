"""Rounds, ratios and ranges with engines that stand in; a peer's process and its errors."""

import shutil
import sys
from pathlib import Path

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
        "serve({'load': load, 'generate': generate})\n"
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
        peer.process.kill()
        with pytest.raises(peers.PeerError, match="ended with status -9; run"):
            peer.ask("generate", prompts=[[1]], new_tokens=2)


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
    assert "at batch 1 a step reads 0 MB" in text
    assert "llama.cpp 1: 1 threads" in text


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
