# Two commands matter: `make lab` opens the notebooks, `make test` runs the tests.
# Both build .venv first when it is missing, broken, or older than pyproject.toml and constraints.txt. Where the package
# finds no C++ compiler, which runs the kernels on the CPU, both install one into .venv.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
PORT   ?= 8888

BIN := $(VENV)/bin

.PHONY: help lab test test-all check docs bench sanitize compiler clean

help:
	@echo "make lab     open JupyterLab on the notebooks"
	@echo "make test    what a change must not break: fast tests and all notebooks, minutes"
	@echo "make test-all  every test and every notebook: about 15 minutes"
	@echo "make check   layout, imports and types of the code; make test begins with it"
	@echo "make docs    build the documentation as a site: build/site/index.html"
	@echo "make bench   every benchmark on the GPU that is there, and the pages that show them: about half an hour"
	@echo "make sanitize  the GPU tests under NVIDIA's compute-sanitizer; hours, on a machine with a GPU"
	@echo "make clean   remove the environment and what the tests leave behind"
	@echo
	@echo "Both install into $(VENV) on first use. PYTHON=python3.12 chooses the interpreter (3.11 to 3.13)."

# Installs the extra $(1), which `$(2)` needs.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt needs Python 3.11; \
	this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@$(BIN)/python -c 'import sys' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $@
	@echo "installing torch, JupyterLab and what $(2) needs into $(VENV): the first time 3 to 10 minutes; afterwards no"
	@echo "network is needed. The large downloads:"
	@{ $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(1)]' && touch $@; } | \
	sed -un 's/^ *Downloading \(.* MB)\).*/  \1/p; s/^Installing collected.*/  all there; unpacking (1 to 3 minutes)/p'
	@test -e $@
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,test,make test)

$(VENV)/.docs: pyproject.toml constraints.txt
	$(call install,docs,make docs)

# Asked each time, because compilers come and go. Without one, and without a network, the rest still works.
compiler: $(VENV)/.installed
	@$(BIN)/python -c 'import os, sys; from gpuaccel.backends import find_compiler; \
	sys.exit(find_compiler()[0] is None and "GPUACCEL_CXX" not in os.environ)' || \
	{ echo "no g++ or clang++ here: installing the compiler ziglang into $(VENV) (100 MB to download, 410 MB on disk),"; \
	  echo "so that kernels run on the CPU"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ziglang; } || true

# It opens on the page that says where to start, rendered. notebooks/.jupyterlab holds the rest: settings (no question
# about news), an extension that colours %%cuda cells, and what a saved notebook keeps. The whole checkout is the root,
# so that kernels can be opened beside notebooks. Without a GPU each notebook gets one thread: two notebooks, or a
# notebook and a compiler, would make each other's threads wait. JupyterLab wants to be told when it is root who starts
# it, as on most rented machines.
LAB := $(CURDIR)/notebooks/.jupyterlab
lab: compiler
	@$(BIN)/python -c 'import sys, gpuaccel; sys.exit(gpuaccel.backend().name != "cuda")' || \
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; \
	export JUPYTER_CONFIG_PATH="$(LAB)$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}"; \
	exec $(BIN)/python -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/README.md \
	  --LabApp.app_settings_dir=notebooks/.jupyterlab --LabApp.extra_labextensions_path=notebooks/.jupyterlab/labextensions \
	  --port=$(PORT) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_OPTIONS)

# One file or notebook is one unit of work (--dist loadfile), because the cells of a notebook share a kernel. One thread
# per worker, so that two workers do not fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests notebooks \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout=600 --nbval-sanitize-with=tests/nbval_sanitize.cfg

test: compiler check
	$(PYTEST) --fast

test-all: compiler check
	$(PYTEST)

check: $(VENV)/.installed
	$(BIN)/python -m ruff check --quiet gpuaccel tests benchmarks docs
	$(BIN)/python -m ruff format --check --quiet gpuaccel tests benchmarks docs
	$(BIN)/python -m mypy

docs: $(VENV)/.docs
	@OMP_NUM_THREADS=1 $(BIN)/python docs/site/build.py

# Goes on after an interruption. ONLY="step clip" measures these; AGAIN=1 measures all anew.
bench: compiler
	@$(BIN)/python benchmarks/run.py $(ONLY) $(if $(AGAIN),--again)

sanitize: $(VENV)/.installed
	@$(BIN)/python -c 'import sys; sys.path.insert(0, "tests"); import sanitize; sanitize.find_sanitizer()' 2>/dev/null || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nvidia-cuda-sanitizer-api
	$(BIN)/python tests/sanitize.py $(SANITIZE)

clean:
	rm -rf $(VENV) dist build .pytest_cache .hypothesis .mypy_cache .ruff_cache
