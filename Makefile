# Two commands on a fresh machine: `make demo` and `make test`.  PYTHON chooses the interpreter.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOG := $(VENV)/test.log
OPTIMIZED_LOG := $(VENV)/optimized.log
PLAIN_LOG := $(VENV)/plain.log
PLAIN_TESTS := tests/ops tests/models/test_decoder_golden.py tests/models/test_real_models.py \
  $(addprefix tests/generation/test_,generate.py parameters.py sharing.py) \
  'tests/generation/test_speculation.py::test_coupled_output_is_that_of_plain_seeded_sampling[ngram]' \
  tests/cli/test_implementation.py tests/weights/test_load.py
# Of `make test`: more workers than cores only cost memory.
WORKERS ?= 2
# A worker takes half of what another has left, so that none idles at the end.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
MODEL ?= smollm2-135m
PROMPT ?= In two sentences: why is the sky blue?

.PHONY: demo test quick plain lint format resolve-cuda kernels gate native sanitize clean help

help:
	@echo "make demo          install, fetch $(MODEL), generate text"
	@echo "make test          install, lint, the whole suite, parts of it in plain XLA and in"
	@echo "                   sanitizers, the kernels' tests on Python 3.12"
	@echo "make quick         the suite without its slow proofs"
	@echo "make plain         what chooses an implementation, without native operations"
	@echo "make lint          format check, ruff, pyright, layers (what the commit hooks run)"
	@echo "make format        put files into the format that lint checks"
	@echo "make kernels       only the kernels' tests on Python 3.12"
	@echo "make native        compile the CPU's native operations, with g++ or clang++"
	@echo "make sanitize      their tests in ASan and UBSan, and their threads in TSan, with g++"
	@echo "make gate          compile changed kernels for GPUs that are not here, write the table"
	@echo "make resolve-cuda  check that the CUDA extras resolve, without downloading them"
	@echo "make clean         remove environments and caches of this folder"

# An environment is made anew when its interpreter is gone, and brought up to date when the
# requirements change.
define install
	@echo "Installing into $(VENV): fetching JAX and the rest, then compiling the CPU's native operations."
	@echo "This takes a minute or two and is quiet meanwhile."
	@bash scripts/make_venv.sh $(VENV) "$(PYTHON)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '$(1)'
	@touch $@
endef

$(VENV)/.stamp-run: pyproject.toml constraints.txt scripts/make_venv.sh
	$(call install,.)

# The pinned pip: older ones download whole wheels to resolve an extra.
$(VENV)/.stamp-test: pyproject.toml constraints.txt scripts/make_venv.sh
	$(call install,.[test])
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	@touch $(VENV)/.stamp-run

# The CPU's native operations (docs/cpu.md).  `pip install` has built them; this is for later.
native: $(VENV)/.stamp-run
	$(BIN)/python -m infer.native.build

sanitize: $(VENV)/.stamp-test
	bash scripts/sanitize.sh $(BIN)/python

# Sources that are newer than the library: it is built anew where there is a compiler.
demo: $(VENV)/.stamp-run
	@$(BIN)/python -m infer.native.build --if-stale || true
	$(BIN)/infer pull $(MODEL)
	$(BIN)/infer generate --chat "$(PROMPT)" --model $(MODEL) --max-tokens 96

lint: $(VENV)/.stamp-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.stamp-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quick: $(VENV)/.stamp-test
	INFER_TEST_COMPILE=fast $(PYTEST) -m "not slow"

# The suite runs native operations where they can be built; this leg runs plain XLA instead.
plain: $(VENV)/.stamp-test
	INFER_NATIVE=0 $(PYTEST) -m "not slow" $(PLAIN_TESTS) 2>&1 | tee $(PLAIN_LOG)

kernels:
	bash scripts/kernels_leg.sh

# Compile the kernels whose sources changed, for every chip of the table; GATE=--all for the whole.
gate:
	bash scripts/kernels_leg.sh gate $(GATE)

resolve-cuda: $(VENV)/.stamp-test
	bash scripts/resolve_cuda.sh $(BIN)/python

# Lint first: it is quick.  The closing line of each test run stands at the end once more.
# Most of the suite's time is XLA's compiler, so most of it has XLA compile fast; what is about the
# programs of users, and the leg in plain XLA, has XLA compile as it does for them.
test: lint resolve-cuda
	INFER_TEST_PULL=1 INFER_TEST_COMPILE=fast $(PYTEST) -m "not optimized" 2>&1 | tee $(LOG)
	INFER_TEST_PULL=1 $(PYTEST) -m optimized 2>&1 | tee $(OPTIMIZED_LOG)
	$(MAKE) --no-print-directory plain
	bash scripts/sanitize.sh $(BIN)/python
	bash scripts/kernels_leg.sh
	@echo
	@$(BIN)/python -c 'import jax, platform; print("main suite, Python", platform.python_version(), "jax", jax.__version__)'
	@tail -n 1 $(LOG)
	@echo "programs as XLA optimises them for users"
	@tail -n 1 $(OPTIMIZED_LOG)
	@echo "with INFER_NATIVE=0"
	@tail -n 1 $(PLAIN_LOG)
	@tail -n 1 $(VENV)/sanitize.log
	@if [ -f .venv-kernels/test.log ]; then echo "kernels' tests, Python 3.12"; tail -n 1 .venv-kernels/test.log; fi

clean:
	rm -rf $(VENV) .venv-kernels build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
