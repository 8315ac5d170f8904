# Everything a developer does, one word each. Needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test test-gpu check format docs site clean

setup: $(VENV)/.ready  ## a virtual environment with oncurve in it

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup  ## a small model learns word problems; a few minutes on a CPU
	$(RUN)/oncurve demo $(ARGS)

test: $(VENV)/.ready-test  ## the whole test suite on a CPU, without a network
	$(RUN)/ruff check --quiet oncurve tests benchmarks
	$(RUN)/python -m pytest $(ARGS)

test-gpu: $(VENV)/.ready-test  ## tests that need a CUDA device
	$(RUN)/python -m pytest -m gpu $(ARGS)

check: $(VENV)/.ready-test  ## format, lint, types
	$(RUN)/ruff format --check oncurve tests benchmarks
	$(RUN)/ruff check oncurve tests benchmarks
	$(RUN)/pyright

format: $(VENV)/.ready-test  ## rewrite files in the house format
	$(RUN)/ruff format oncurve tests benchmarks
	$(RUN)/ruff check --fix oncurve tests benchmarks

docs: $(VENV)/.ready-test  ## regenerate the pages that are made from code
	$(RUN)/python docs/generate.py

site: $(VENV)/.ready-test  ## the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --quiet --site-dir build/site

clean:  ## remove what these commands made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
