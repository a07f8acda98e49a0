# One command per task; each builds the environment first where it is missing.
PY := .venv/bin/python
PYTHON ?=

.PHONY: setup demo test test-all bench bench-scaling bench-capture docs check lint clean

setup: .venv/.ready

.venv/.ready: requirements/cpu.txt requirements/setup.sh requirements/check.py pyproject.toml
	@PYTHON="$(PYTHON)" bash requirements/setup.sh

demo: setup
	$(PY) launch/run.py conf=demo

# Tests share the cores with others, so their idle OpenMP threads sleep instead of spinning.
test test-all: export OMP_WAIT_POLICY := passive

# Two at a time, a file each, on a thread each: half the time on two cores.
test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "not slow"

test-all: setup
	$(PY) -m pytest -q

bench: setup
	$(PY) docs/benchmarks/training_step/run.py docs/benchmarks

bench-scaling: setup
	$(PY) docs/benchmarks/training_step/scaling.py docs/benchmarks

bench-capture: setup
	$(PY) docs/benchmarks/capture/run.py docs/benchmarks

docs: setup
	$(PY) -m eval.catalogue

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright

lint: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
