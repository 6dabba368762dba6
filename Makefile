# `make demo` and `make test` each set everything up on a fresh machine, then do their job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
TESTABLE := $(VENV)/.testable
EXTRAS := dev,hf,mmseg,smp,torchvision,datasets,ray

.PHONY: demo test browser format clean

demo: $(READY)
	$(BIN)/segprox demo

# One thread per worker: torch's threads spin while they wait, so two workers with two threads each are far slower.
test: $(TESTABLE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --cov --cov-report=term

# Tests of the report page need a browser and are skipped without one; only root on Debian can be helped.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then echo "chromium is there"; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; \
	else echo "no chromium: tests in a browser will be skipped"; fi

format: $(TESTABLE)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Pinned versions first, so that nothing newer (and no CUDA build) is pulled in.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $(READY)

# Tests compare with the libraries whose models can be loaded.
$(TESTABLE): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(TESTABLE)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .coverage segprox-demo
