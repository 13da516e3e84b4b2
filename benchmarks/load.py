"""Load time and peak memory of a Llama-3.2-1B-shaped model, from a folder and from GGUF, and the
peak of generating with it.

    python benchmarks/load.py --save

Builds the files with random weights (a bfloat16 folder, and GGUF in the mixture of types that
Q4_K_M has: random block bytes), then loads each in a process of its own.  Prints one JSON line.
See benchmarks/README.md for what each number is.
"""

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

# Llama 3.2 1B's config.json, but for what is no number.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
# The prompt and the new tokens of the case that generates.
PROMPT, NEW = 512, 16
# What is loaded: name -> (file, load's dtype, packed).
CASES: dict[str, tuple[str, str, bool]] = {
    "folder_bfloat16": ("bf16", "bfloat16", False),
    "folder_float32": ("bf16", "float32", False),
    "gguf_q4_k_m_packed": ("q4_k_m.gguf", "float32", True),
    "gguf_q4_k_m_bfloat16": ("q4_k_m.gguf", "bfloat16", False),
    "gguf_q4_k_m_float32": ("q4_k_m.gguf", "float32", False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.one:
        print(json.dumps(load_one(*options.one)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        build(Path(scratch), CONFIG | {"num_hidden_layers": options.layers})
        line = header(options) | {"cases": dict(measured(Path(scratch), options))}
    print(json.dumps(line))
    if options.save:
        with open(options.save, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--scratch", help="where the files are built, 3.3 GB [default: the system's]")
    p.add_argument("--save", nargs="?", const=str(default_file()), help="append the line to a file")
    p.add_argument("--only", nargs="*", help="cases to run [default: all]")
    p.add_argument(
        "--one", nargs=4, metavar=("PATH", "DTYPE", "PACKED", "NEW"), help=argparse.SUPPRESS
    )
    return p


def default_file() -> Path:
    return _ROOT / "benchmarks" / "results" / f"load-cpu-{datetime.date.today()}.json"


def build(scratch: Path, config: dict[str, Any]) -> None:
    """Write the folder, and the GGUF file that it becomes with other types."""
    from infer.models.checkpoint import HFConfig
    from infer.models.registry import layout_of
    from infer.weights.convert import convert
    from infer.weights.gguf import GGUFFile
    from infer.weights.gguf_writer import GGUFTensor, metadata_of, write_gguf
    from infer.weights.safetensors_writer import Entry, write_folder
    from infer.weights.slots import plan, wanted_shapes

    layout = layout_of(config["architectures"])
    slots = plan(layout.config(HFConfig(config)), layout.layer_names, layout.global_names)
    folder = scratch / "bf16"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries = {
        name: Entry(dtype="BF16", shape=shape, read=lambda s=shape, n=name: weights(s, n))
        for name, shape in wanted_shapes(slots).items()
    }
    write_folder(folder, entries, {"format": "pt"})
    plain = convert(folder, scratch / "plain.gguf")[0]
    with GGUFFile.open(plain) as file:
        tensors = [
            GGUFTensor(
                name=name,
                shape=info.shape,
                type_name=kind,
                data=lambda n=name, k=kind, s=info.shape: packed(file.array(n), k, s),
            )
            for name, info in file.tensors.items()
            for kind in [kind_of(name, info, config["num_hidden_layers"])]
        ]
        write_gguf(scratch / "q4_k_m.gguf", metadata_of(file), tensors)
    plain.unlink()


def weights(shape: tuple[int, ...], name: str) -> np.ndarray:
    draw = np.random.default_rng(len(name)).standard_normal(shape, np.float32)
    return (draw * shape[-1] ** -0.5 if len(shape) == 2 else 1 + draw).astype(ml_dtypes.bfloat16)


def kind_of(name: str, info: Any, num_layers: int) -> str:
    """Return the type that llama.cpp's Q4_K_M gives a tensor; a tied embedding is Q6_K."""
    if len(info.shape) == 1:
        return "F32"
    if name == "token_embd.weight":
        return "Q6_K"
    if "attn_v" in name or "ffn_down" in name:
        i, n = int(name.split(".")[1]), num_layers
        if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def packed(values: np.ndarray, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return random bytes where a tensor is quantised, with scales that are finite."""
    from infer.quant.blocks import FORMATS

    if kind == "F32":
        return values
    format = FORMATS[kind]
    rows = math.prod(shape) // format.group
    blocks = np.random.default_rng(rows).integers(0, 256, (rows, format.block_bytes), np.uint8)
    scale = np.float16(1e-3).tobytes()
    at = (0, 2) if kind == "Q4_K" else (format.block_bytes - 2,)
    for start in at:
        blocks[:, start : start + 2] = np.frombuffer(scale, np.uint8)
    return blocks


def measured(scratch: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of each case: the best time and the largest peak of all rounds."""
    base = run("-", "float32", False)["peak_bytes"]
    for case, (name, dtype, is_packed) in CASES.items():
        if options.only and case not in options.only:
            continue
        path = scratch / name
        file_bytes = size_of(path)
        found = [run(str(path), dtype, is_packed) for _ in range(options.rounds)]
        peak = max(one["peak_bytes"] for one in found)
        held = found[0]["weight_bytes"]
        yield (
            case,
            {
                "load_s": round(min(one["load_s"] for one in found), 3),
                "file_bytes": file_bytes,
                "weight_bytes": held,
                "largest_tensor_bytes": found[0]["largest_bytes"],
                "peak_bytes": peak,
                "peak_without_imports_bytes": peak - base,
                "peak_to_weights": round((peak - base) / held, 3),
            },
        )

    case = "generate"
    if not options.only or case in options.only:
        path = scratch / "q4_k_m.gguf"
        found = [run(str(path), "float32", True, NEW) for _ in range(options.rounds)]
        file_bytes, pool = size_of(path), found[0]["pool_bytes"]
        peak = max(one["peak_bytes"] for one in found)
        yield (
            case,
            {
                "prompt_tokens": PROMPT,
                "new_tokens": NEW,
                "file_bytes": file_bytes,
                "weight_bytes": found[0]["weight_bytes"],
                "pool_bytes": pool,
                "peak_bytes": peak,
                "peak_without_imports_bytes": peak - base,
                "peak_to_file_and_pool": round(peak / (file_bytes + pool), 3),
            },
        )


def size_of(path: Path) -> int:
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def run(path: str, dtype: str, is_packed: bool, new: int = 0) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", path, dtype, str(int(is_packed)), str(new)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def load_one(path: str, dtype: str, is_packed: str, new: str) -> dict[str, Any]:
    """Load a file and generate `new` tokens, or with "-" only import and start JAX."""
    import jax
    import jax.numpy as jnp

    from infer.weights.folder import load_folder
    from infer.weights.load import load_gguf

    jax.block_until_ready(jnp.zeros(1).astype(jnp.bfloat16))
    started = time.perf_counter()
    leaves: list[Any] = []
    if path != "-":
        if Path(path).is_dir():
            params = load_folder(path, dtype=dtype)
        else:
            params = load_gguf(path, dtype=dtype, packed=is_packed == "1")
        leaves = jax.block_until_ready(jax.tree.leaves(params))
    seconds = time.perf_counter() - started
    sizes = [leaf.nbytes for leaf in leaves]
    pool = 0
    if int(new):
        import infer

        prompt = np.random.default_rng(0).integers(0, 1000, PROMPT).tolist()
        infer.generate(params, [prompt], sampling=infer.SamplingParams(max_tokens=int(new)))
        width = 2 * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * len(params.layers)
        pool = (PROMPT + int(new)) * width * 4
    return {
        "pool_bytes": pool,
        "load_s": seconds,
        "peak_bytes": peak_bytes(),
        "weight_bytes": sum(sizes),
        "largest_bytes": max(sizes, default=0),
    }


def peak_bytes() -> int:
    """Return the most memory this process had; getrusage would begin with its parent's."""
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) << 10 for x in status.splitlines() if x.startswith("VmHWM"))


def header(options: argparse.Namespace) -> dict[str, Any]:
    import jax

    import infer

    return {
        "benchmark": "load",
        "shape": "Llama-3.2-1B",
        "layers": options.layers,
        "rounds": options.rounds,
        "date": str(datetime.date.today()),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {"infer": infer.__version__, "jax": jax.__version__},
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
