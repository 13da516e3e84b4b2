"""A folder that another tool has quantised, as one of our own form: the same readers take it."""

import logging
import re
from collections.abc import Callable, Mapping

import numpy as np

from infer.config import ModelConfig
from infer.errors import WeightFormatError
from infer.models.checkpoint import HFConfig, Layout
from infer.weights.packed_form import PARTS, PackedForm
from infer.weights.quantised.bitsandbytes import bitsandbytes
from infer.weights.quantised.compressed_tensors import compressed
from infer.weights.quantised.floats8 import fbgemm, fp8
from infer.weights.quantised.gptq import awq, gptq
from infer.weights.quantised.matrix import Matrix, Part, Tensors
from infer.weights.quantised.modelopt import modelopt
from infer.weights.safetensors import TensorInfo
from infer.weights.shards import SafetensorsFolder
from infer.weights.slots import Slot, plan, slots_of

logger = logging.getLogger(__name__)

Reader = Callable[[HFConfig, Tensors], dict[str, Matrix]]
# quant_method of config.json -> what reads the tensors.
READERS: dict[str, Reader] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm,
    "modelopt": modelopt,
    "bitsandbytes": bitsandbytes,
}
# Scales of a cache, which has its own here (`kv_dtype`).
_CACHE_SCALES = re.compile(r".*\.([kvq]_scale|prob_scale|[kv]_proj\.output_scale)")


class TranslatedFolder(SafetensorsFolder):
    """The tensors of a folder under the names that the family knows, quantised matrices as the
    parts of packed ones: what `infer.weights.packed_folder` reads.  `form` says which are packed.
    """

    def __init__(
        self, files: SafetensorsFolder, layout: Layout, config: ModelConfig, quantised: HFConfig
    ):
        """Read the headers, and the small tensors that say what the others are.

        Args:
            files: the open files of the folder.
            layout: of the family.
            config: what the model is.
            quantised: the configuration of the quantisation; `quant_method` is a key of READERS.

        Raises:
            WeightFormatError: a layout that is not read, or tensors that do not fit it.
        """
        self.path, self.layout = files.path, layout
        self.files, self.metadata = {}, {}
        self._files = files
        self._names: dict[str, str] = {}
        for name in files.tensors:
            canonical = layout.canonical(name)
            if canonical is None:
                continue
            if canonical in self._names:
                raise WeightFormatError(
                    f"{files.path}: {self._names[canonical]} and {name} are the same tensor"
                )
            self._names[canonical] = name
        infos = {new: files.tensors[name] for new, name in self._names.items()}
        method = quantised.text("quant_method")
        found = READERS[method](quantised, Tensors(files.path, infos, self._source))
        if not found:
            raise WeightFormatError(
                f"{files.path}: is said to be quantised by {method}, and no tensor is; correct"
                " config.json, or get the folder again"
            )
        gone = {name for matrix in found.values() for name in matrix.sources}
        scales = {name for name in infos if name not in gone and _CACHE_SCALES.fullmatch(name)}
        unused = {name: why for matrix in found.values() for name, why in matrix.unused.items()}
        self._say(scales, unused)
        self._parts: dict[str, Part] = {}
        weights = {}
        for name, matrix in _by_weight(found, layout, config, files.path).items():
            weights[name] = matrix.format
            for part in PARTS:
                if part in matrix.parts:
                    self._parts[f"{name}.{part}"] = matrix.parts[part]
        self._sources = {
            f"{name}.data": found[module].sources[0]
            for module in found
            for name in weights
            if name == f"{module}.weight"
        }
        self.form = PackedForm(weights)
        self.tensors: dict[str, TensorInfo] = {
            name: info for name, info in infos.items() if name not in gone | scales
        } | {
            name: TensorInfo(
                name=name, shape=part.shape, dtype=part.dtype, offset=0, nbytes=part.nbytes
            )
            for name, part in self._parts.items()
        }

    def array(self, name: str) -> np.ndarray:
        """Return a tensor, or the part of a packed weight."""
        if name not in self._parts:
            return self._source(name)
        part = self._parts[name]
        values = np.asarray(part.read())
        assert values.shape == part.shape, (name, values.shape, part.shape)
        return values

    def release(self, name: str) -> None:
        """Drop a tensor's pages."""
        source = self._sources.get(name, name)
        if source in self._names:
            self._files.release(self._names[source])

    def _source(self, name: str) -> np.ndarray:
        return self._files.array(self._names[name])

    def _say(self, scales: set[str], unused: Mapping[str, str]) -> None:
        if scales:
            logger.warning(
                "%s: %d scales for cached keys and values are not used; kv_dtype says how they are"
                " cached",
                self.path,
                len(scales),
            )
        for why in dict.fromkeys(unused.values()):
            names = [name for name, reason in unused.items() if reason == why]
            logger.warning(
                "%s: %s and %d others are not used: %s", self.path, names[0], len(names) - 1, why
            )


def _by_weight(
    found: Mapping[str, Matrix], layout: Layout, config: ModelConfig, path: str
) -> dict[str, Matrix]:
    """Return the quantised matrices by the names of the weights that they are; of a tensor that
    holds several, the rows of each.
    """
    from infer.weights.packed_folder import place_names

    slots = slots_of(plan(config.validate(), layout.layer_names, layout.global_names))
    of: dict[str, list[tuple[Slot, str]]] = {}
    for slot, name in zip(slots, place_names(slots), strict=True):
        of.setdefault(slot.tensor, []).append((slot, name))
    weights, problems = {}, []
    for module, matrix in found.items():
        tensor = f"{module}.weight"
        if tensor not in of:
            problems.append(f"{module!r:.120} is quantised, and this model has no such weight")
        for slot, name in of.get(tensor, ()):
            if slot.transposed:
                problems.append(f"{tensor} lies transposed in this family, and is quantised")
                continue
            weights[name] = matrix if slot.rows is None else matrix.rows(slot.rows, tensor)
    if problems:
        from infer.weights.shards import listed

        raise listed(path, problems)
    return weights
