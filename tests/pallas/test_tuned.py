"""Tables of measured block sizes: who reads them, what they may set, and what is wrong with one."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from infer.ops import choice, matmul_sizes
from infer.ops.experts import expert_mlp
from infer.ops.linear import linear
from infer.pallas import grouped_matmul as grouped
from infer.pallas import quantized_matmul as quantized
from infer.pallas import scaled_matmul as scaled
from infer.pallas import tuned as tables
from infer.pallas.tuned import tuned
from infer.quant.methods import FP8, RTN
from tests.cases.kernels.quantized_matmul import packed
from tests.cases.tuning import CASES

pytestmark = pytest.mark.kernels

H200 = "h200-141gb"
INT4 = "INT4-G128 4096x4096 bfloat16"


def on(kind: str) -> Any:
    """Return a context in which programs are traced for a described GPU."""
    device = jax.sharding.AbstractDevice(kind, 1, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what writes a table of an H200 into the folder that is read."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    (tmp_path / H200).mkdir()

    def write(kernel: str, shapes: dict[str, Any] | str) -> None:
        entries = shapes
        if isinstance(shapes, dict):
            entries = json.dumps({"shapes": {k: {"fields": f} for k, f in shapes.items()}})
        (tmp_path / H200 / f"{kernel}.json").write_text(str(entries))

    return write


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return the sizes that the ops pass to each kernel, which is left out."""
    seen: dict[str, list[Any]] = {"quantized": [], "scaled": [], "grouped": []}

    def product(name: str, out: Any) -> Any:
        def run(x: Any, *args: Any, blocks: Any = None, **options: Any) -> Any:
            seen[name].append(blocks)
            return jnp.zeros(*out(x, *args, **options))

        return run

    f32 = jnp.float32
    monkeypatch.setattr(
        quantized,
        "quantized_matmul",
        product("quantized", lambda x, w, **_: ((len(x), w.shape[0]), f32)),
    )
    monkeypatch.setattr(
        scaled, "scaled_matmul", product("scaled", lambda x, s, w, **_: ((len(x), w.shape[0]), f32))
    )
    monkeypatch.setattr(
        grouped,
        "grouped_matmul",
        product(
            "grouped",
            lambda x, w, n, up=None, **_: ((len(x), w.shape[1]), f32 if up is None else x.dtype),
        ),
    )
    return seen


def _linear(name: str, rows: int, kind: str = "NVIDIA H200") -> None:
    """Trace a product of `rows` rows with a weight 4096 x 4096."""
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    methods = {"int4": RTN(bits=4, group_size=128), "fp8": FP8(activations="token")}
    weight = jax.eval_shape(methods[name].pack, jax.ShapeDtypeStruct((4096, 4096), jnp.float32))
    with on(kind):
        jax.eval_shape(lambda x, w: linear(x, w), x, weight)


def test_the_ops_take_measured_sizes_by_format_shape_and_class_of_rows(write, seen) -> None:
    few, more = {"block_out": 32, "splits": 16}, {"block_out": 128, "block_rows": 64}
    write("quantized_matmul", {f"{INT4} 1-16 rows": few, f"{INT4} 17-64 rows": more})
    for rows in (1, 16, 17):
        _linear("int4", rows)
    one, sixteen, seventeen = seen["quantized"]
    assert one == sixteen == quantized.QuantizedMatmulBlocks(block_out=32, splits=16, num_warps=8)
    assert (seventeen.block_out, seventeen.block_rows, seventeen.splits) == (128, 64, 1)
    key = "FP8-E4M3-A:e4m3 4096x4096 float8_e4m3fn 65-512 rows"
    write("scaled_matmul", {key: {"num_warps": 4, "block_out": 128}})
    _linear("fp8", 512)
    assert seen["scaled"] == [scaled.ScaledMatmulBlocks(block_out=128, block_rows=128, num_warps=4)]


def test_the_experts_take_measured_sizes_by_their_mean_share(write, seen) -> None:
    write(
        "grouped_matmul",
        {
            "bfloat16 4x24x64 bfloat16 1-16 rows gated": {"block_out": 16},
            "bfloat16 4x64x24 bfloat16 1-16 rows": {"num_warps": 2},
        },
    )
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    ids, weights = jax.ShapeDtypeStruct((32, 2), jnp.int32), shape(32, 2)
    with on("NVIDIA H200"):
        jax.eval_shape(
            lambda *a: expert_mlp(*a, activation="silu"),
            *(shape(32, 64), ids, weights, shape(4, 24, 64), shape(4, 24, 64), shape(4, 64, 24)),
        )
    assert seen["grouped"] == [
        grouped.GroupedMatmulBlocks(block_out=16),
        grouped.GroupedMatmulBlocks(num_warps=2),
    ]


def test_without_a_table_the_kernel_chooses(write, seen) -> None:
    _linear("int4", 16)
    _linear("fp8", 16)
    write("quantized_matmul", {f"{INT4} 1-16 rows": {"block_out": 32}})
    _linear("int4", 16, "NVIDIA A100-SXM4-80GB")  # another chip
    _linear("int4", 16, "NVIDIA GPU of no name")
    own = quantized.QuantizedMatmulBlocks.for_shape(16, 4096, 32)
    assert seen["quantized"] == [own, own, own]
    assert seen["scaled"] == [scaled.ScaledMatmulBlocks.for_shape(16)]


def test_a_table_changes_no_bits_of_what_it_may_not(write) -> None:
    """Tiles, warps and stages leave a row's sum as it is, split or not."""
    weight = packed("int4 g32", 40, 128, jax.random.key(3))
    x = jax.random.normal(jax.random.key(4), (3, 128), jnp.bfloat16)
    run = lambda blocks: quantized.quantized_matmul(x, weight, blocks=blocks, interpret=True)
    own = quantized.QuantizedMatmulBlocks.for_shape(3, 40, 4)
    key = matmul_sizes.key_of(weight, 3, x.dtype)
    write("quantized_matmul", {key: {"block_out": 16, "num_warps": 4, "num_stages": 4}})
    with on("NVIDIA H200"):
        sizes = matmul_sizes.quantized_sizes(x, weight)
    assert sizes is not None and sizes != own and sizes.splits == own.splits
    assert jnp.array_equal(run(sizes), run(own))


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (1, {"block_out": 48}, r"INT4-G128.*block_out is 48; use a power of two"),
        (1, {"block_rows": 32}, r"block_rows is not tuned there, only block_out, splits"),
        (40, {"splits": 4}, r"splits is not tuned there, only block_out, block_rows"),
        (1, {"tile": 4}, r"tile is not tuned there"),
        (1, {"num_warps": 3}, r"num_warps is 3; use 1, 2"),
    ],
)
def test_a_wrong_table_is_named(rows: int, fields: dict[str, int], message: str, write) -> None:
    write("quantized_matmul", {f"{INT4} {'1-16' if rows == 1 else '17-64'} rows": fields})
    with pytest.raises(ValueError, match=rf"h200-141gb/quantized_matmul.json .*{message}"):
        _linear("int4", rows)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"shapes": {"k": {}}}', '{"shapes": 3}'])
def test_a_broken_table_is_named(text: str, write) -> None:
    write("paged_attention", text)
    with pytest.raises(
        ValueError, match=r"paged_attention.json is broken .*; run scripts/tune_blocks.py"
    ):
        tuned(quantized.QuantizedMatmulBlocks(), "paged_attention", H200, "any")


def test_every_case_that_is_tuned_has_a_key_that_its_op_asks_for(write, monkeypatch) -> None:
    """The keys of the ops and those that scripts/tune_blocks.py writes are of one function."""
    asked = []
    record = lambda sizes, kernel, chip, key, may: asked.append((kernel, key, may)) or sizes
    monkeypatch.setattr(matmul_sizes, "tuned", record)
    wanted = []
    for case in CASES:
        assert case.tuning
        wanted.append((case.kernel, case.tuning.key, case.tuning.fields))
        jax.eval_shape(_ask(case.kernel), jax.eval_shape(case.make, jax.random.key(0)))
    assert asked == wanted
    assert len(set(wanted)) == len(wanted)


def _ask(kernel: str) -> Any:
    """Return a function of a case's arguments that asks for the kernel's sizes."""

    def ask(given: Any) -> Any:
        if kernel == "grouped_matmul":
            x, _, weight, *up = given
            matmul_sizes.grouped_sizes(x, weight, gated=bool(up))
        elif kernel == "scaled_matmul":
            matmul_sizes.scaled_sizes(given[0], given[2])
        else:
            matmul_sizes.quantized_sizes(*given)
        return jax.tree.leaves(given)[0]

    return ask


def test_e4m3_products_are_refused_on_a_chip_without_them() -> None:
    weight = jax.eval_shape(
        FP8(activations="token").pack, jax.ShapeDtypeStruct((128, 128), jnp.float32)
    )
    x = jax.ShapeDtypeStruct((4, 128), jnp.bfloat16)
    run = lambda name: jax.eval_shape(lambda x, w: linear(x, w, implementation=name), x, weight)
    with on("NVIDIA A100-SXM4-80GB"), choice.recording() as choices:
        run(None)
        with pytest.raises(
            NotImplementedError, match=r"FP8-E4M3.*\(128, 128\).*8\.9, not NVIDIA A100"
        ):
            run("triton")
    assert [c.implementation for c in choices] == ["xla"]
    with on("NVIDIA L4"), choice.recording() as choices:
        run(None)
    assert [c.implementation for c in choices] == ["triton"]
