"""Models of a hub, against a stand-in on 127.0.0.1."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

import infer
from infer.cli.main import main
from infer.errors import ConfigError, WeightFormatError
from infer.weights import hub
from infer.weights.safetensors_writer import write_folder
from tests import hub_server
from tests.tokenizer.tokenizer_json import byte_level
from tests.weights.hf_folders import CONFIGS, golden_weights

ID = "org/tiny-llama"


def _files(folder: Path, shard_bytes: int) -> dict[str, bytes]:
    folder.mkdir()
    write_folder(folder, golden_weights("llama"), max_shard_bytes=shard_bytes)
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    # The vocabulary of 96 rows is smaller than the tokenizer's: the ids beyond are refused.
    return files | {
        "config.json": json.dumps(CONFIGS["llama"]).encode(),
        "generation_config.json": b'{"eos_token_id": [2, 3]}',
        "tokenizer.json": byte_level().to_str().encode(),
        "tokenizer_config.json": b'{"eos_token": "<|eos|>"}',
        "additional_chat_templates/rag.jinja": b"x",
        "pytorch_model.bin": b"never fetched",
        "README.md": b"never fetched",
        "onnx/model.safetensors": b"never fetched",
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return _files(tmp_path_factory.mktemp("hub") / "main", 40_000)


@pytest.fixture
def server(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[hub_server.Hub]:
    old = dict(files) | {"generation_config.json": b'{"eos_token_id": 9}'}
    with hub_server.serve({ID: {"main": dict(files), "old": old}}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield running


def test_a_model_is_fetched_and_loaded(server: hub_server.Hub) -> None:
    model = infer.load(ID)
    fetched = [name for name, _ in server.downloads()]
    assert len(fetched) == len(set(fetched))
    assert not {"pytorch_model.bin", "README.md", "onnx/model.safetensors"} & set(fetched)
    assert sum(name.endswith(".safetensors") for name in fetched) > 1
    assert model.path.name == hub_server.COMMITS["main"]
    np.testing.assert_array_equal(
        model.params.embed, golden_weights("llama")["model.embed_tokens.weight"]
    )
    assert model.config.eos_ids == (2, 3)
    assert model.config.num_tokens == 96
    assert "rag" in model.tokenizer.chat_templates
    server.requests.clear()
    assert hub.pull(ID) == model.path  # nothing is fetched twice
    assert server.downloads() == []
    assert hub.cached(ID) == model.path


def test_a_revision_is_pinned(server: hub_server.Hub) -> None:
    by_name = infer.load(ID, revision="old")
    assert by_name.config.eos_ids == (9, 2)
    assert infer.load(f"{ID}@old").path == by_name.path
    assert infer.load(f"{ID}@{'b' * 40}").path == by_name.path
    assert hub.cached(ID) is None
    assert hub.cached(ID, revision="old") == by_name.path
    with pytest.raises(ConfigError, match="has no revision 'new'"):
        infer.load(ID, revision="new")
    with pytest.raises(ConfigError, match="names a revision, and revision='main' another"):
        infer.load(f"{ID}@old", revision="main")
    with pytest.raises(ConfigError, match="goes with a hub id"):
        infer.load("smollm2-135m", revision="main")


def test_a_broken_download_goes_on(
    server: hub_server.Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    name = max((n for n in files if n.endswith("safetensors") and "/" not in n), key=len)
    server.cut[name] = 1000
    steps: list[tuple[str, int, int]] = []
    path = hub.pull(ID, progress=lambda *step: steps.append(step))
    assert [part for n, part in server.downloads() if n == name] == [None, "bytes=1000-"]
    assert (path / name).read_bytes() == files[name]
    total = sum(len(b) for n, b in files.items() if n.endswith("safetensors") and "/" not in n)
    assert steps[-1] == ("download", total, total)
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)


def test_offline_a_whole_copy_is_used(
    server: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hub.pull(ID)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.pull(ID) == path
    with pytest.raises(ConnectionError, match=f"no whole copy of {ID} at old; run `infer pull"):
        hub.pull(ID, revision="old")
    shard = sorted(path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ConnectionError, match="has no whole copy"):
        hub.pull(ID)


def test_a_hub_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match="the hub does not answer"):
        hub.pull(ID)


def test_what_the_hub_refuses(server: hub_server.Hub) -> None:
    with pytest.raises(ConfigError, match="the hub has no model org/absent, or it is private"):
        hub.pull("org/absent")
    server.gated.add(ID)
    with pytest.raises(ConfigError, match="is gated; accept its terms"):
        hub.pull(ID)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": b'{"architectures": ["MambaForCausalLM"]}'}, "Mamba"),
        ({"config.json": b'{"quantization_config": {"quant_method": "exl2"}}'}, "by 'exl2'"),
        ({"config.json": b"{"}, "is no JSON"),
        ({"config.json": None}, "config.json"),
        ({"*.safetensors": None}, "pickles are never read"),
    ],
)
def test_what_cannot_be_loaded_is_not_fetched(
    server: hub_server.Hub, change: dict[str, bytes | None], message: str
) -> None:
    repository = server.repositories[ID]["main"]
    for name, data in change.items():
        if name.startswith("*"):
            for n in [n for n in repository if "safetensors" in n and "/" not in n]:
                del repository[n]
        elif data is None:
            del repository[name]
        else:
            repository[name] = data
    with pytest.raises(ValueError, match=message):
        hub.pull(ID)
    assert not [n for n, _ in server.downloads() if n.endswith(".safetensors")]


def test_a_wrong_sha256_is_not_kept(server: hub_server.Hub, files: dict[str, bytes]) -> None:
    name = next(n for n in files if n.endswith("safetensors") and "/" not in n)
    server.lie.add(name)
    with pytest.raises(WeightFormatError, match="not the hub's"):
        hub.pull(ID)
    assert hub.cached(ID) is None
    server.lie.clear()
    assert hub.pull(ID).joinpath(name).read_bytes() == files[name]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"run `pip install 'infer\[hf\]'`"):
        hub.pull(ID)


def test_names() -> None:
    assert hub.parse("org/name") == ("org/name", None)
    assert hub.parse("org/name@v1.0") == ("org/name", "v1.0")
    assert hub.parse("org/name@refs/pr/1") == ("org/name", "refs/pr/1")
    for no in ("name", "a/b/c", "../a", "/a/b", "a/b@", "a b/c", "", "./b/c"):
        assert hub.parse(no) is None, no


def test_the_command_in_a_process_of_its_own(
    server: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HF_ENDPOINT and HF_HOME as a user sets them; no JAX, and one line when it fails."""
    code = "import sys; from infer.cli.main import main; c = main(sys.argv[1:]);"
    code += "print('jax' in sys.modules); sys.exit(c)"
    run = lambda *arguments: subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    done = run("pull", ID)
    assert done.returncode == 0, done.stderr
    path, jax = done.stdout.splitlines()
    assert (Path(path) / "config.json").exists() and jax == "False"
    missing = run("pull", "org/absent")
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1 and "no model org/absent" in missing.stderr


def test_info_of_a_hub_id(server: hub_server.Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", ID]) == 2
    assert f"is not in the cache; run `infer pull {ID}`" in capsys.readouterr().err
    hub.pull(ID)
    assert main(["info", ID, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "LlamaForCausalLM"
    # 3 layers x (k and v) x 2 heads x 12 numbers
    figures = found["kv_bytes_per_token"]
    assert (figures["bf16"], figures["f32"]) == (3 * 2 * 2 * 12 * 2, 3 * 2 * 2 * 12 * 4)
    assert found["tensor_types"].keys() == {"F32"}
