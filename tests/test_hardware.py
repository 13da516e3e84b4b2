"""Chips: the seed's numbers, refusals, and a CPU whose measured figures are plausible."""

import dataclasses

import pytest

from infer import hardware
from infer.errors import ConfigError


def test_literals():
    h100 = hardware.get_chip("h100-80gb")
    assert (h100.memory_bytes, h100.bandwidth, h100.peak_flops("bf16")) == (80e9, 3.35e12, 989e12)
    assert hardware.get_chip("rtx-5060-8gb").bandwidth == 448e9
    assert hardware.get_chip("h200-141gb").bandwidth == 4.8e12
    assert hardware.chip_names() == (
        "h100-80gb",
        "h200-141gb",
        "a100-80gb",
        "b200-180gb",
        "l4-24gb",
        "l40s-48gb",
        "rtx-4090-24gb",
        "rtx-5060-8gb",
        "cpu-local",
    )


@pytest.mark.parametrize("chip", hardware.GPUS.values(), ids=lambda chip: chip.name)
def test_name_carries_the_memory_and_peaks_grow_as_types_shrink(chip: hardware.Chip):
    assert chip.memory_bytes == int(chip.name.rsplit("-", 1)[1].removesuffix("gb")) * 10**9
    peaks = [chip.f32_flops, chip.bf16_flops, chip.fp8_flops, chip.fp4_flops]
    known = [peak for peak in peaks if peak is not None]
    assert known == sorted(known)
    # Only Ada, Hopper and later multiply fp8; only Blackwell fp4.
    assert chip.compute_capability is not None
    assert (chip.fp8_flops is not None) == (chip.compute_capability >= (8, 9))
    assert (chip.fp4_flops is not None) == (chip.compute_capability >= (10, 0))


def test_unknown_chip_and_type_say_what_there_is():
    with pytest.raises(ConfigError, match=r"'h100'; known: h100-80gb, .*cpu-local"):
        hardware.get_chip("h100")
    with pytest.raises(
        ConfigError, match=r"a100-80gb multiplies no fp8 matrices; it has f32, bf16, int8"
    ):
        hardware.get_chip("a100-80gb").peak_flops("fp8")
    with pytest.raises(ConfigError, match=r"no f64"):
        hardware.get_chip("a100-80gb").peak_flops("f64")


def test_chip_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.get_chip("l4-24gb").bandwidth = 1.0  # type: ignore[misc]


def test_local_cpu():
    chip = hardware.get_chip("cpu-local")
    assert chip is hardware.get_chip("cpu-local")  # measured once
    assert chip.num_cores is not None and chip.num_cores >= 1
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < chip.memory_bytes <= total
    assert 1e8 < chip.bandwidth < 1e13
    assert 1e8 < chip.f32_flops < 1e15


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 5060", "rtx-5060-8gb"),
        ("NVIDIA GB200", None),
        ("cpu", None),
    ],
)
def test_a_drivers_name_finds_the_chip(kind: str, name: str | None) -> None:
    assert hardware.chip_of_kind(kind) == name
