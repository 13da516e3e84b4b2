"""The examples do what they say, on tiny models."""

import importlib.util
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import tiny

FOLDER = Path(__file__).parents[2] / "examples"


def _module(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_policys_reward_grows() -> None:
    example = _module("policy_gradient")
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        rewards = example.train(num_steps=40, seed=1)
    # Chance is 0.5; a mean of five steps of 64 rows of 8 ids has a deviation of 0.01.
    assert abs(np.mean(rewards[:2]) - 0.5) < 0.15
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert example.step._cache_size() == 1


def test_research_passes_its_own_checks_and_they_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    example = _module("research")
    params, key = tiny.llama(), jax.random.key(0)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, tiny.NUM_TOKENS, (2, 7)))
    assert example.check_gap(params, prompts, key, 5) < 1e-4
    entropies, _ = example.check_temperatures(params, prompts, key)
    assert 0 < entropies[0] < entropies[-1] < np.log(96)
    monkeypatch.setattr(example, "TEMPERATURES", (1.0, 0.5))
    with pytest.raises(AssertionError, match="must grow"):
        example.check_temperatures(params, prompts, key)
    monkeypatch.setattr(example, "TOLERANCE", -1.0)
    with pytest.raises(AssertionError):
        example.check_gap(params, prompts, key, 5)


def test_entropy_by_hand() -> None:
    example = _module("research")
    logits = jnp.log(jnp.asarray([[0.5, 0.5], [0.25, 0.75]], jnp.float32))
    expected = [np.log(2), -0.25 * np.log(0.25) - 0.75 * np.log(0.75)]
    np.testing.assert_allclose(example.entropy(logits), expected, rtol=1e-6)
