"""The profile's reading of a program's text and what it computes from it."""

import numpy as np
import pytest

from benchmarks import profile_cpu
from infer.native.repack import Packed
from infer.pytree import Leaf, pytree_dataclass, static

_TEXT = """
%fused (p: f32[4]) -> f32[4] {
  ROOT %add.1 = f32[4]{0} add(%p, %p)
}
ENTRY %main {
  %while.3 = (s32[], /*index=5*/f32[4]{0}) while(%tuple), condition=%c, body=%b
  %ffi_call.1 = (f32[2,64]{1,0}, f32[2,32]{1,0}) custom-call(%x, %g, %q, %k), \
custom_call_target="infer_linear", operand_layout_constraints={f32[2,64]{1,0}, f32[64]{0}, \
u8[4,100]{1,0}, u8[2,100]{1,0}}, api_version=API_VERSION_TYPED_FFI, \
metadata={op_name="jit(run)/attention/ffi_call"}
  %ffi_call.2 = f32[2,160]{1,0} custom-call(%x, %e), custom_call_target="infer_linear", \
operand_layout_constraints={f32[2,64]{1,0}, u8[10,100]{1,0}}, api_version=API_VERSION_TYPED_FFI
  %ffi_call.3 = f32[2,64]{1,0} custom-call(%t, %e), custom_call_target="infer_embed", \
operand_layout_constraints={s32[2]{0}, u8[10,100]{1,0}}, api_version=API_VERSION_TYPED_FFI
  %fusion.7 = f32[4]{0} fusion(%x), kind=kLoop, metadata={op_name="jit(run)/while/sample/add"}
  %copy.9 = f32[4]{0} copy(%x)
}
"""


@pytree_dataclass
class _Config:
    vocab_size: int = static()


@pytree_dataclass
class _Params:
    weights: tuple[Leaf, ...]
    config: _Config = static()


def _params() -> _Params:
    weight = lambda panels: Packed(
        np.zeros((panels, 100), np.uint8), format="Q8_0", shape=(16 * panels, 64)
    )
    return _Params((weight(4), weight(2), weight(10)), config=_Config(160))


def test_instructions_get_labels_and_bounds() -> None:
    found = profile_cpu.operations_of(_TEXT, _params())
    assert {name: op.label for name, op in found.items()} == {
        "add.1": "XLA: slots, masks and positions",
        "ffi_call.1": "norm, query, key and value products",
        "ffi_call.2": "head",
        "ffi_call.3": "embed",
        "fusion.7": "XLA: sample",
        "copy.9": "XLA: slots, masks and positions",
    }
    assert found["ffi_call.1"].weight_bytes == 600
    assert found["ffi_call.1"].macs == 2 * (64 + 32) * 64
    assert found["ffi_call.2"].weight_bytes == 1000
    assert found["ffi_call.3"].weight_bytes == 0
    assert found["ffi_call.1"].bound(bandwidth=600.0, macs=1e9) == 1.0
    assert found["ffi_call.1"].bound(bandwidth=1e9, macs=12288.0) == 1.0


def test_a_table_adds_up() -> None:
    row = lambda s, b: dict(seconds=s, count=3.0, bound=b)
    part = dict(clock=0.9e-2, traced=1e-2, rows={"head": row(6e-3, 3e-3), "embed": row(1e-3, 0)})
    found = dict(model="m", batch=2, prompt=8, context=4, steps=5, parts={"decode": part})
    lines = profile_cpu.table(found).splitlines()
    assert lines[0].startswith("**m, decode step, batch 2, context 4 to 9: 9.00 ms**")
    assert lines[4:] == [
        "| head | 6.000 | 60% | 3 | 3.000 | 50% |",
        "| embed | 1.000 | 10% | 3 |  |  |",
        "| between operations | 3.000 | 30% |  |  |  |",
        "| all | 10.000 | 100% |  | 3.000 | 30% |",
    ]


def test_writing_replaces_what_is_between_the_marks(tmp_path, monkeypatch) -> None:
    doc = tmp_path / "performance.md"
    doc.write_text(f"before\n{profile_cpu._BEGIN}\nold\n{profile_cpu._END}\nafter\n")
    monkeypatch.setattr(profile_cpu, "_DOC", doc)
    found = dict(model="m", batch=1, threads=2, isa="avx2", bandwidth=2e10, int8_macs=1e12)
    for _ in range(2):
        profile_cpu.write([found | dict(parts={})])
    text = doc.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("20.0 GB/s") == 1


def test_bandwidth_is_of_this_universe() -> None:
    assert 1e8 < profile_cpu.read_bandwidth(1, 1 << 22) < 1e13


@pytest.mark.parametrize(("isa", "macs"), [("avx2", 32), ("avx512", 128), ("amx", 1024)])
def test_peak_of_multiply_adds(isa: str, macs: int, monkeypatch) -> None:
    import io

    monkeypatch.setattr("builtins.open", lambda *a, **k: io.StringIO("cpu MHz\t\t: 1000.0\n"))
    assert profile_cpu.int8_macs(2, isa) == 2 * 1e9 * macs
