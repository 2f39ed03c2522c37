# Everything runs in a virtual environment of its own; VENV and PYTHON can be overridden.
# CI pins the small CPU build of torch: make test TORCH=torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
TORCH ?=
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
READY = $(VENV)/.ready

.PHONY: demo test check gpu golden bench clean

demo: $(READY) ## install the package and run the main job
	$(VENV)/bin/python -m examples.quickstart

test: $(READY) ## all tests that need no GPU
	$(PIP) ".[test]"
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m "not gpu" -n auto

check: $(READY) ## format, lint, types, import contracts, size budget
	$(PIP) ".[check]"
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python tests/size_budget.py

gpu: ## tests on a CUDA device, with the environment's own python
	$(PYTHON) -m pytest -m gpu tests/gpu

golden: $(READY) ## accept new golden text, then read the diff
	EXPECTTEST_ACCEPT=1 $(VENV)/bin/python -m pytest -m "not gpu"
	git diff --stat

bench: ## benchmarks on a CUDA device, with the environment's own python
	$(PYTHON) -m benchmarks.step_time
	$(PYTHON) -m benchmarks.capture_cost
	$(PYTHON) -m benchmarks.compile_time
	$(PYTHON) -m benchmarks.call_overhead
	$(PYTHON) -m benchmarks.modes
	$(PYTHON) -m benchmarks.fusions
	$(PYTHON) -m benchmarks.fused_layers
	$(PYTHON) -m benchmarks.one_row
	$(PYTHON) -m benchmarks.tuned_sizes

clean:
	rm -rf $(VENV) build *.egg-info

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) -e .
	touch $@
