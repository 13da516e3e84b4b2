"""A loaded model: weights and tokenizer together; `load` that makes one from a name or a file, and
`save` that writes one.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from infer import native
from infer.backend import DeviceLike, default_platform, find_device, on_device
from infer.compiling import give_back_memory
from infer.config import ModelConfig
from infer.errors import ConfigError
from infer.generation import GenerationResult, TextStream, generate, stream
from infer.models.params import Params, weight_form
from infer.sampling import SamplingParams
from infer.tokenizer import Tokenizer
from infer.weights import bundled, hub
from infer.weights.folder import load_folder
from infer.weights.gguf import GGUFFile
from infer.weights.load import load_gguf
from infer.weights.new_folder import refuse_leftover
from infer.weights.packed_folder import calibration_of, write_params
from infer.weights.packed_form import Calibration
from infer.weights.safetensors_writer import MAX_SHARD_BYTES
from infer.weights.slots import Progress

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Model:
    """What `load` returns.  `params` is all that the pure functions need; the rest is for
    people.
    """

    params: Params
    tokenizer: Tokenizer
    name: str
    path: Path
    # What a quantised model's folder says that it was calibrated with; `save` writes it again.
    calibration: Calibration | None = None

    def __repr__(self) -> str:
        c = self.config
        weights, dtype = weight_form(self.params), self.params.dtype.name
        return (
            f"Model({self.name!r}: {c.family}, {c.num_layers} layers, width {c.hidden_size}, "
            f"{dtype}{'' if weights == dtype else f', weights {weights}'})"
        )

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.params.config

    def generate(
        self, prompts: Sequence[Any] | str, sampling: Any = None, **options: Any
    ) -> GenerationResult:
        """Generate from every prompt with this model's tokenizer; takes `infer.generate`'s
        options.
        """
        return generate(
            self.params, prompts, tokenizer=self.tokenizer, sampling=sampling, **options
        )

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> TextStream:
        """Yield the text of one prompt's continuation as it grows; see `infer.stream`."""
        return stream(self.params, prompt, tokenizer=self.tokenizer, sampling=sampling, **options)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> TextStream:
        """Yield the assistant's reply to `messages` as it grows, by the model's own chat
        template.
        """
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self.stream(ids, sampling, **options)


def load(
    name: str | Path,
    *,
    dtype: DTypeLike | None = None,
    packed: bool | str | None = False,
    revision: str | None = None,
    progress: Progress | None = None,
    device: DeviceLike = None,
) -> Model:
    """Load a model.

    Args:
        name: a known name (`infer models` lists them; fetched when missing), the path of a GGUF
            file, a folder in transformers' layout, or a hub id: "org/name" or "org/name@revision".
            A path that exists is never taken for a hub id.
        dtype: of activations and unpacked weights; None is float32 on a CPU and bfloat16 on a GPU.
        packed: keep matrices as they are in the file: least memory.  On a CPU with native
            operations those multiply them so, quantised ones with activations rounded to 8 bits,
            and others unrounded; elsewhere it is for quantised ones, and means "blocks": the file's
            own blocks, which plain XLA decodes inside the program.  What `save` wrote packed stays
            so in any case; True repacks it for the native operations.  None is True where native
            operations are there, else False.
        revision: of a hub id: a branch, tag or commit.
        progress: called with (bytes done, bytes in all) while weights are read.
        device: where the weights go and stay: a jax.Device, "cpu", "gpu", "cpu:1"; None is JAX's
            default device.

    Raises:
        ConfigError: an unknown name, dtype, architecture or device.
        ConnectionError: a hub id that is not in the cache, and no network.
        WeightFormatError: the file is broken or of a kind that is not read.
        CapacityError: the weights do not fit in memory.
    """
    target = find_device(device)
    path = resolve(name, revision=revision)
    with on_device(target):
        model = _load(str(name), path, dtype, packed, progress)
    if target is None:
        return model
    # Already there; this also binds them to the device, so that programs run there.
    return dataclasses.replace(model, params=jax.device_put(model.params, target))


def save(
    model: Model | Params,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    form: str = "infer",
    calibration: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model into a folder that `load` reads; packed weights come back bit for bit.

    What stays in floats has the names and the layout of transformers' checkpoints; packed weights
    are bytes and scales beside it, and config.json says their formats (docs/quantisation.md).
    Written whole or not at all.

    Args:
        model: a Model, or its weights: float arrays and QArrays, as `infer.quantize` gives them.
        folder: a name that is not taken, or an empty folder.
        tokenizer: of the weights; a Model has its own.
        form: of packed weights: "infer", which has a place for every format, or
            "compressed-tensors", which vLLM and transformers load.
        calibration: the token ids [N, S] that `infer.quantize` was given, so that `infer eval` can
            tell when it is asked to evaluate on them; or a `infer.quantization.Calibration`, which
            may also say which text and method.  A Model has the record that it was loaded with.
        max_shard_bytes: tensor bytes of one file.
        progress: called with (bytes done, bytes in all).

    Returns:
        The weight files.

    Raises:
        ConfigError: the folder is not empty, there is no tokenizer, weights are packed for this
            CPU's native operations, no config.json says what the model is, or the form has no place
            for a packed weight.
        WeightFormatError: the tokenizer has no form in such a folder.
    """
    if isinstance(model, Model):
        params, tokenizer = model.params, model.tokenizer if tokenizer is None else tokenizer
        calibration = model.calibration if calibration is None else calibration
    else:
        params = model
    if tokenizer is None:
        raise ConfigError(
            "a folder that infer.load reads has a tokenizer; pass tokenizer=model.tokenizer, or a"
            " Model with these weights: dataclasses.replace(model, params=params)"
        )
    record = calibration
    if calibration is not None and not isinstance(calibration, Calibration):
        record = Calibration.of(calibration)
    return write_params(
        params,
        tokenizer,
        Path(folder),
        form=form,
        calibration=record,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def _load(
    name: str,
    path: Path,
    dtype: DTypeLike | None,
    packed: bool | str | None,
    progress: Progress | None,
) -> Model:
    if packed not in (True, False, None, "blocks"):
        raise ConfigError(
            f"packed is {packed!r}; use True, False, 'blocks', or None, which chooses"
        )
    if packed is None:
        packed = default_platform() == "cpu" and native.by_default()
    default = "float32" if default_platform() == "cpu" else "bfloat16"
    checked = checked_dtype(default if dtype is None else dtype)
    if path.is_dir():
        if packed == "blocks":
            raise ConfigError(
                f"packed='blocks' keeps the blocks of a GGUF file, and {path} is a folder; leave it"
                " out"
            )
        refuse_leftover(path)
        tokenizer = Tokenizer.from_folder(path)
        params = load_folder(
            path,
            dtype=checked,
            num_tokens=tokenizer.vocab_size,
            packed=bool(packed),
            progress=progress,
        )
        record = calibration_of(path)
        return Model(params=params, tokenizer=tokenizer, name=name, path=path, calibration=record)
    params = load_gguf(path, dtype=checked, packed=packed, progress=progress)
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    give_back_memory()
    return Model(params=params, tokenizer=tokenizer, name=name, path=path)


def checked_dtype(dtype: DTypeLike) -> Any:
    """Return a dtype that weights and activations can have.

    Raises:
        ConfigError: it is none.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name}; weights and activations can be {', '.join(_DTYPES)}")
    return jnp.dtype(name)


def resolve(name: str | Path, *, revision: str | None = None) -> Path:
    """Return the file or folder that `name` stands for, fetching what is missing.

    Tried in this order: a known name, a file, a folder, a hub id.

    Raises:
        ConfigError: it is none of them; the message lists what was tried.
    """
    if revision is not None and (hub.parse(str(name)) is None or Path(name).exists()):
        raise ConfigError(f"revision={revision!r} goes with a hub id, and {str(name)!r} is none")
    if str(name) in bundled.known_models():
        return bundled.pull(str(name))
    path = Path(name).expanduser()
    if path.suffix == ".safetensors" and path.is_file():
        raise ConfigError(f"{path} is a part of a model; give its folder, {path.parent}")
    if path.is_file() or path.is_dir():
        return path
    if isinstance(name, str) and hub.parse(name) is not None and path.suffix != ".gguf":
        return hub.pull(name, revision=revision)
    known = ", ".join(sorted(bundled.known_models()))
    raise ConfigError(
        f"{str(name)!r} is neither a known model ({known}) nor a file, a folder or a hub id; give"
        " one of these, a .gguf path, a folder with config.json, or org/name"
    )
