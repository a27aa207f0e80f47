# What a developer runs; `make help` lists it.
#
#   make setup TORCH=2.12.1                         another torch, in .venv-2.12.1
#   make setup PIP_ARGS="--extra-index-url URL"     another index, for example PyTorch's with CPU builds
#   make test ARGS="-k config"                      more arguments for pytest

TORCH ?= 2.14.1
PYTHON ?= python3
PIP_ARGS ?=
# of the tests: the thorough ones too; all; or none but those with this mark
THOROUGH ?=
SLOW ?=
ONLY ?=
STEPS ?= 20
# one for each GPU, or two on the CPU
GPUS = $(filter-out 0,$(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU))
RANKS ?= $(or $(GPUS),2)
# of the tests, each with ranks of its own; 0: in one process, one after another
WORKERS ?= logical
ARGS ?=
# for pytest, which of several -m reads the last: one in ARGS takes the place of this
QUICK := not slow$(if $(THOROUGH),, and not thorough)
MARKS := $(if $(SLOW),$(ONLY),$(if $(ONLY),$(ONLY) and not slow,$(QUICK)))

# The releases that belong to each torch. freescale.doctor knows the TorchRec ones too; a test compares them.
# FBGEMM 1.9 does not load under torch 2.15: freescale's own tables only.
TORCHREC_2.15 := none
TRITON_2.15 := 3.9.0
TORCHREC_2.14 := 1.9.2
FBGEMM_2.14 := 1.9.0
TRITON_2.14 := 3.8.0
TORCHREC_2.13 := 1.8.0
FBGEMM_2.13 := 1.8.0
TRITON_2.13 := 3.7.1
TORCHREC_2.12 := 1.7.0
FBGEMM_2.12 := 1.7.0
TRITON_2.12 := 3.7.1
TORCHREC_2.11 := 1.6.1
FBGEMM_2.11 := 1.6.0
TRITON_2.11 := 3.6.0
# The interpreter of Triton 3.6 turns arrays of one element into numbers, which NumPy 2.4 does not do any more.
NUMPY_2.11 := "numpy<2.4"

MINOR := $(word 1,$(subst ., ,$(TORCH))).$(word 2,$(subst ., ,$(TORCH)))
TORCHREC := $(TORCHREC_$(MINOR))
FBGEMM := $(FBGEMM_$(MINOR))
TRITON := $(TRITON_$(MINOR))

# TorchRec asks for fbgemm-gpu, which exists for x86-64 with CUDA only; so it goes in without its dependencies,
# and they are listed here.
TORCHREC_NEEDS := tensordict pyre-extensions torchmetrics tqdm iopath psutil typing-extensions

VENV := $(if $(filter 2.14.1,$(TORCH)),.venv,.venv-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.freescale-is-set-up
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install --no-warn-conflicts $(PIP_ARGS)
PACKAGES := fs_compile passes kernels runtime
LIBRARY := kernels/native/_native.abi3.so

.DEFAULT_GOAL := help
.PHONY: help setup train test lint figures docs doctor clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(LIBRARY) ## create the virtual environment for TORCH (2.14.1) and install everything into it

# Who changes the C code has it built again, and nothing else installed.
$(LIBRARY): setup.py $(wildcard kernels/native/*.[ch]) | $(STAMP)
	@echo "Building the C code."
	@$(PIP) --no-deps --no-build-isolation -e .

$(STAMP): pyproject.toml Makefile
	$(if $(TORCHREC),,$(error TORCH must be 2.11.x to 2.15.x, found $(TORCH)))
	@echo "Creating the virtual environment $(VENV)."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH), freescale and the tools of its developers."
	@$(PIP) "torch==$(TORCH)" -e ".[dev]" $(NUMPY_$(MINOR))
	@if [ "$$(uname -s)" = Linux ] && ! $(BIN)/python -c "import triton" 2>/dev/null; then \
	    echo "Installing triton $(TRITON), which this build of torch does not bring."; \
	    $(PIP) "triton==$(TRITON)" || echo "There is no triton $(TRITON) for this machine; going on without it."; \
	fi
	@if [ "$(TORCHREC)" = none ]; then \
	    echo "There is no TorchRec for torch $(TORCH) yet; going on without it: freescale's own tables work."; \
	    touch $@; exit 0; \
	fi; \
	fbgemm=fbgemm-gpu-cpu; \
	if [ "$$(uname -m)" = x86_64 ] && nvidia-smi >/dev/null 2>&1; then fbgemm=fbgemm-gpu; fi; \
	echo "Installing torchrec $(TORCHREC) and $$fbgemm $(FBGEMM)."; \
	if $(PIP) "torch==$(TORCH)" $(TORCHREC_NEEDS) \
	    && $(PIP) --no-deps "torchrec==$(TORCHREC)" "$$fbgemm==$(FBGEMM)" \
	    && $(BIN)/python -W ignore -c "import torchrec.distributed.embedding" 2>$(VENV)/torchrec.log; \
	then rm -f $(VENV)/torchrec.log; \
	else \
	    tail -n 1 $(VENV)/torchrec.log 2>/dev/null; \
	    $(BIN)/python -m pip -q uninstall -y torchrec $$fbgemm >/dev/null 2>&1; \
	    echo "TorchRec cannot be used on this machine; going on without it: freescale's own tables work."; \
	fi
	@touch $@
	@echo "Ready: $(BIN)/python. Next: make doctor, make test, make train."

train: $(LIBRARY) ## train the example for STEPS (20) steps on RANKS processes (one for each GPU, or two on the CPU)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_hstu.py --steps $(STEPS) $(ARGS)

test: $(LIBRARY) ## run the quick tests (THOROUGH=1: the thorough ones too, SLOW=1: all, ONLY=thorough: those alone, FRESH=1: other random numbers); those for a GPU skip themselves where there is none
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --maxprocesses 8 $(if $(MARKS),-m "$(MARKS)") $(ARGS)

lint: $(STAMP) ## check style (ruff) and types (mypy)
	$(BIN)/ruff check .
	@rm -rf build/types && mkdir -p build/types/freescale  # as it is installed, so that mypy knows each module's types
	@for f in fs_compile/* $(wordlist 2,9,$(PACKAGES)); do ln -s ../../../$$f build/types/freescale/; done
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p freescale

figures: $(LIBRARY) ## simulate and draw the figures of docs/paper.md and docs/benchmarks.md (some minutes; ARGS="--only ranks": one of them)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/figures.py $(ARGS)

docs: $(STAMP) ## build the documentation site in build/docs (mkdocs)
	@$(BIN)/python -c "import mkdocs" 2>/dev/null || $(PIP) "mkdocs>=1.6,<2"
	$(BIN)/python -m mkdocs build --strict --quiet

doctor: $(LIBRARY) ## show what is installed, what works and what is missing
	@$(BIN)/python -m freescale doctor

clean: ## remove builds and caches; the virtual environments stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
