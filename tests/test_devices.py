"""`device=` of each call, on eight CPU devices in a process of its own."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import infer
from infer import backend
from infer.errors import ConfigError
from tests.models import tiny

ROOT = Path(__file__).parents[1]
PROMPTS = [[5, 9, 3], [7] * 20]
SAMPLING = infer.SamplingParams(temperature=0.8, seed=3, max_tokens=6)

SCRIPT = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
import infer
from infer.generation import facade
from tests.models import tiny
from tests.test_devices import PROMPTS, SAMPLING

here, there = jax.devices()[0], jax.devices()[3]
seen = []
result = facade.Job.result
def spied(self):
    seen.append({d for x in jax.tree.leaves(self.state) for d in x.devices()})
    return result(self)
facade.Job.result = spied

params = tiny.llama()
plain = infer.generate(params, PROMPTS, sampling=SAMPLING)
for device in (there, "cpu:3"):
    moved = infer.generate(params, PROMPTS, sampling=SAMPLING, key=jax.random.key(1), device=device)
    np.testing.assert_array_equal(moved.tokens, plain.tokens)
    np.testing.assert_array_equal(moved.logprobs, plain.logprobs)
    assert moved.stats["device"] == str(there), moved.stats
    assert moved.stats["bytes_moved"] == sum(x.nbytes for x in jax.tree.leaves(params))
assert seen == [{here}, {there}, {there}], seen

# Weights that were put on a device run there without being asked to, and are not copied.
bound = jax.device_put(params, there)
assert infer.generate(bound, PROMPTS, sampling=SAMPLING).token_ids(1) == plain.token_ids(1)
assert seen[-1] == {there}
asked = infer.generate(bound, PROMPTS, sampling=SAMPLING, device="cpu:3")
assert asked.stats["bytes_moved"] == 0
back = infer.generate(bound, PROMPTS, sampling=SAMPLING, device="cpu")
assert seen[-1] == {here} and back.stats["bytes_moved"] > 0

# So does a drafter's part; where it lies elsewhere it is refused, or moved along.
drafter = infer.spec.DraftModel(bound, k=2, rule="coupled")
try:
    infer.generate(params, PROMPTS, sampling=SAMPLING, draft=drafter)
except infer.ConfigError as error:
    assert f"the drafter's weights are on {there} and the model's on {here}" in str(error)
else:
    raise AssertionError("not refused")
both = infer.generate(params, PROMPTS, sampling=SAMPLING, draft=drafter, device="cpu:5")
assert both.stats["bytes_moved"] == 2 * sum(x.nbytes for x in jax.tree.leaves(params))
assert both.token_ids(1) == plain.token_ids(1)

tokens = jnp.asarray([PROMPTS[1]])
scores = infer.score(params, tokens, device="cpu:3")
assert scores.devices() == {there}
np.testing.assert_allclose(scores, infer.score(params, tokens), rtol=1e-6)
assert infer.score(bound, tokens).devices() == {there}

llm = infer.LLM(model=infer.Model(params, None, "tiny", None), device="cpu:5")
assert {d for x in jax.tree.leaves(llm.model.params) for d in x.devices()} == {jax.devices()[5]}
assert llm.generate(PROMPTS, SAMPLING)[1].outputs[0].token_ids == plain.token_ids(1)
assert seen[-1] == {jax.devices()[5]}
print("done")
"""


def test_results_of_a_device_are_the_same_and_stay_there() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.stdout == "done\n", run.stderr


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "give 'cpu', 'gpu', one of several"),
        ("cpu:", "give 'cpu'"),
        ("cpu:-1", "give 'cpu'"),
        (3, "give 'cpu'"),
        ("cpu:99", "is not here, only cpu:0 to cpu:"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: object, message: str) -> None:
    for call in (infer.generate, infer.score):
        with pytest.raises(ConfigError, match=message):
            given = PROMPTS if call is infer.generate else jnp.asarray(PROMPTS[:1])
            call(tiny.llama(), given, device=device)


def test_a_missing_gpu_is_named_with_what_there_is() -> None:
    if "gpu" in infer.backends():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="device 'gpu' is not here, only cpu:0"):
        infer.generate(tiny.llama(), PROMPTS, device="gpu")


def test_a_trace_places_its_own_program() -> None:
    params, tokens = tiny.llama(), jnp.asarray(PROMPTS[:1])
    with pytest.raises(ConfigError, match="inside a trace"):
        jax.jit(lambda p: infer.generate(p, tokens, device="cpu").tokens)(params)
    with pytest.raises(ConfigError, match="inside a trace"):
        jax.grad(lambda p: infer.score(p, tokens, device="cpu").sum())(params)


def test_the_platform_is_that_of_new_arrays() -> None:
    assert backend.default_platform() == "cpu"
    assert backend.default_device() == jax.devices()[0]
    assert backend.device_of({"a": 1}) is None
