# `make demo` and `make test` each set everything up on a fresh machine, then do their job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
TESTABLE := $(VENV)/.testable
WRITABLE := $(VENV)/.writable
EXTRAS := dev,geo,hf,mmseg,onnx,smp,torchvision,datasets,ray

.PHONY: demo test docs package browser format clean

demo: $(READY)
	$(BIN)/segprox demo

# One thread per worker: torch's threads spin while they wait, so two workers with two threads each are far slower.
test: $(TESTABLE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --cov --cov-report=term

# The site, in site/: any warning is an error. EXECUTE=false leaves notebooks as they are, for drafts.
docs: $(WRITABLE)
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	$(BIN)/python scripts/check_site.py site

# What would be published, checked, and installed into an environment that has nothing else.
package: $(TESTABLE)
	rm -rf dist .venv-package
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd dist && ../.venv-package/bin/segprox demo --images 1 --steps 20
	rm -rf .venv-package

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

$(WRITABLE): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $(WRITABLE)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .coverage .venv-package dist segprox-demo site
