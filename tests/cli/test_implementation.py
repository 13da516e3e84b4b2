"""What runs a model here, and what is said where native operations are missing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infer import native
from infer.cache.pool import KV_DTYPES
from infer.cli import implementation
from infer.cli.loading import load_model
from infer.cli.main import main
from infer.native import build
from infer.ops import choice
from tests.cli.test_info import gguf  # noqa: F401  # a fixture
from tests.weights.test_summary import smollm2

PARAMS = {"Q4_1": 900, "IQ4_XS": 90, "F32": 5}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native operations that work."""
    monkeypatch.delenv("INFER_NATIVE", raising=False)
    monkeypatch.setattr(implementation, "_backend", lambda: "cpu")
    monkeypatch.setattr(native, "_open", lambda: (Library(), ""))


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native operations that could be built."""
    monkeypatch.delenv("INFER_NATIVE", raising=False)
    monkeypatch.setattr(implementation, "_backend", lambda: "cpu")
    monkeypatch.setattr(build, "unsupported", lambda: "")
    monkeypatch.setattr(native, "_open", lambda: (None, "it is not built; build it"))


class Library:
    def infer_native_isa(self) -> bytes:
        return b"avx2"

    def infer_native_num_threads(self) -> int:
        return 3


@pytest.mark.usefixtures("there")
def test_native_with_the_products_that_have_no_kernel():
    report = implementation.runs_here(PARAMS)
    assert report == {
        "backend": "cpu",
        "implementation": "native",
        "isa": "avx2",
        "num_threads": 3,
        "reason": None,
        "xla_products": ["IQ4_XS"],
    }
    assert implementation.text_of(report) == (
        "native operations on the CPU, avx2, 3 threads; products of IQ4_XS in plain XLA"
    )


@pytest.mark.usefixtures("there")
def test_a_type_that_native_products_do_not_read():
    report = implementation.runs_here({"BF16": 10, "F64": 10})
    assert (report["implementation"], report["xla_products"]) == ("native", ["F64"])


@pytest.mark.usefixtures("missing")
def test_why_not_native(gguf: Any, capsys: pytest.CaptureFixture[str]):  # noqa: F811
    path = gguf(smollm2())
    assert main(["info", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["runs_here"]
    assert (report["implementation"], report["isa"]) == ("xla", None)
    assert report["reason"] == "it is not built; build it"
    assert main(["info", path]) == 0
    line = "  runs here      plain XLA on the CPU: it is not built; build it\n"
    assert line in capsys.readouterr().out


@pytest.mark.usefixtures("there")
def test_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INFER_NATIVE", "0")
    report = implementation.runs_here(PARAMS)
    assert (report["implementation"], report["reason"]) == ("xla", "INFER_NATIVE is 0")


def test_a_gpu_chooses_for_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(implementation, "_backend", lambda: "gpu")
    report = implementation.runs_here(PARAMS)
    assert (report["backend"], report["implementation"]) == ("gpu", None)
    assert implementation.text_of(report) == "on the GPU, each operation's best implementation"


def test_info_needs_no_jax(tmp_path: Path):
    code = """
import sys
from infer.cli import implementation
implementation._GPU_PLUGINS = ()
print(implementation.runs_here({"Q4_1": 1})["backend"], "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "cpu False\n", done.stderr


@pytest.mark.usefixtures("model", "missing")
class TestTheLineOnStandardError:
    LINE = "infer: plain XLA, without the faster native operations: it is not built; build it\n"

    def test_where_they_could_be_had(self, capsys: pytest.CaptureFixture[str]):
        load_model("m")
        assert capsys.readouterr() == ("", self.LINE)

    def test_once_for_two_models(self, capsys: pytest.CaptureFixture[str]):
        load_model("m")
        load_model("m", beside=True)
        assert capsys.readouterr() == ("", self.LINE)

    @pytest.mark.parametrize(
        "case", ["off", "another machine", "forced", "gpu"], ids=lambda x: x.replace(" ", "_")
    )
    def test_is_not_for_others(
        self, case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        if case == "off":
            monkeypatch.setenv("INFER_NATIVE", "0")
        if case == "another machine":
            monkeypatch.setattr(build, "unsupported", lambda: "for x86-64 Linux only")
        if case == "gpu":
            monkeypatch.setattr("infer.backend.default_platform", lambda: "gpu")
        load_model("m", implementation="xla" if case == "forced" else None)
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "given,implementation,packed",
    [(None, None, None), (True, None, True), (None, "xla", False), (True, "xla", "blocks")],
)
def test_a_forced_implementation_gets_weights_it_can_read(
    model: Any, given: bool | None, implementation: str | None, packed: bool | str | None
):
    load_model("m", packed=given, implementation=implementation)
    assert model.loads == [("m", {"dtype": None, "packed": packed})]


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("packed", [None, True, False])
def test_native_by_name_where_it_is_there(model: Any, packed: bool | None):
    load_model("m", packed=packed, implementation="native")
    assert model.loads == [("m", {"dtype": None, "packed": packed})]


@pytest.mark.usefixtures("missing")
def test_native_by_name_where_it_is_missing_is_one_line(
    model: Any, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", "hi", "--model", "m", "--implementation", "native"]) == 2
    assert capsys.readouterr() == (
        "",
        "infer: --implementation native: it is not built; build it\n",
    )
    assert model.loads == []


@pytest.mark.parametrize("name", ["folder", "some/model"])
def test_a_folder_packed_for_xla_is_refused_before_loading(
    model: Any,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    command = ["generate", "hi", "--model", name, "--packed", "--implementation", "xla"]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert (out, model.loads, err.count("\n")) == ("", [], 1)
    assert f"--packed with --implementation xla: {name} is a folder" in err


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("--implementation", choice.IMPLEMENTATIONS),
        ("--kv-dtype", (*KV_DTYPES, "fp8")),
    ],
)
def test_names_that_are_none_are_refused_before_loading(
    model: Any, option: str, allowed: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", "hi", "--model", "m", option, "cuda"]) == 2
    out, err = capsys.readouterr()
    assert (out, model.loads, err.count("\n")) == ("", [], 1)
    assert f"'{option}': 'cuda' is not one of {', '.join(map(repr, allowed))}" in err
    for name in allowed:
        if name != "native":  # which may be missing here
            assert main(["generate", "hi", "--model", "m", option, name]) == 0
            field = option[2:].replace("-", "_")
            assert model.calls[-1][2] == {field: name}
            assert type(model.calls[-1][2][field]) is str


@pytest.mark.parametrize("option", ["--num-slots", "--page-size", "--prefill-chunk"])
def test_sizes_of_nothing_are_refused_before_loading(
    model: Any, option: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", "hi", "--model", "m", option, "0"]) == 2
    assert (model.loads, f"Invalid value for '{option}'" in capsys.readouterr().err) == ([], True)


def test_help_names_all_implementations(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--help"]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert "|".join(choice.IMPLEMENTATIONS) in text


def test_a_switch_that_keeps_native_operations_out_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", "hi", "--model", "m"]) == 0
    assert capsys.readouterr().err.endswith(", cpu, xla (INFER_NATIVE is 0)\n")
    assert main(["generate", "hi", "--model", "m", "--implementation", "xla"]) == 0
    assert capsys.readouterr().err.endswith(", cpu, xla\n")
    monkeypatch.setenv("INFER_NATIVE", "off")
    assert main(["generate", "hi", "--model", "m"]) == 2
    assert "INFER_NATIVE is 'off'; 0 leaves" in capsys.readouterr().err
