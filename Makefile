# Two commands, each complete by itself from a fresh clone: `make demo` and `make test`.
# They need Python >= 3.10 with pip, make and a C compiler, and install into .venv what .ci/constraints.txt pins.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Both names: the second is how newer pips constrain the build backend.
export PIP_CONSTRAINT := .ci/constraints.txt
export PIP_BUILD_CONSTRAINT := .ci/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test gpu orders integrations programs peers lint bench kit dask ray mutate mutate-source sanitizers fuzz hardware sentryward mmasim dsl-versions torch-versions ptxas docs pictures release hub nightly clean

demo: $(VENV)/.installed-run
	$(BIN)/python docs/examples/photographs.py $(ARGS)

# Where Python is told to write no bytecode, each of a hundred processes would compile every module that it imports, and
# pytest in each of its processes rewrite the assertions of every test, eight seconds.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-test
	$(BIN)/python -m compileall -q -j 2 cute_kernels bench tests
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# On a machine with an SM90 or SM100 GPU. docs/contributing.md says which wheels, in which order.
gpu: $(VENV)/.installed-test
	-$(BIN)/cute-kernels doctor
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# The whole suite in ten random orders: does a test need another one before it? docs/contributing.md
orders: $(VENV)/.installed-test
	$(BIN)/python -m tests.random_orders $(ARGS)

# timm, open_clip and vLLM, which need torchvision and with it another torch: in an environment of their own.
integrations: $(VENV)-integrations/.installed
	$(VENV)-integrations/bin/python -m pytest tests/models/other_torch $(ARGS)

# Kernels that others wrote, in the emulator, each as it is recorded; prints a table. docs/emulator/programs.md
programs: $(VENV)-programs/.installed
	$(VENV)-programs/bin/python -m tests.public_programs $(ARGS)

# Samples of the test suites of other projects, in the emulator, out of checkouts in the folder PEERS; prints a table.
# docs/emulator/programs.md
peers: $(VENV)-peers/.installed
	$(VENV)-peers/bin/python -m tests.peer_suites $(if $(PEERS),'$(PEERS)',$(error PEERS must be a folder with checkouts)) $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .

# On a machine with a GPU since Ampere. nvidia-ml-py reads its clocks and power. Peers whose packages are missing are shown as such.
bench: $(VENV)/.installed-run
	$(BIN)/python -m pip install --quiet nvidia-ml-py rich
	$(BIN)/python -m bench.patch_embed $(ARGS)

# On a GPU since Ampere, without further thought: everything worth knowing of it in half an hour, in one archive. docs/contributing.md
kit: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet nvidia-ml-py
	$(BIN)/python -m bench.kit $(ARGS)

# Every synchronisation instruction of our kernels dropped or weakened, one at a time: what is not noticed? docs/mutation.md
mutate: $(VENV)/.installed-test
	$(BIN)/python -m tests.emulator.checking.mutation $(ARGS)

# Changes of the Python source of most rooms, drawn at random: which do the tests miss? docs/mutation.md
mutate-source: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable '.[verify]'
	$(BIN)/python -m tests.source_mutation $(ARGS)

# The emulator's tests, and damaged programs, with a core that AddressSanitizer and UndefinedBehaviorSanitizer watch.
# docs/contributing.md
sanitizers: $(VENV)/.installed-test
	$(BIN)/python -m tests.sanitizers --processes 2 $(ARGS)
	$(BIN)/python -m tests.sanitizers --module tests.emulator.fuzz --inputs 10000 --jobs 2 --input-seconds 600

# Damaged programs, launch shapes, tensor maps: each ends in success or an error that names what is wrong. docs/contributing.md
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.emulator.fuzz --inputs 100000 --jobs 2 $(ARGS)

# On a machine with an SM90 GPU: every launch of the emulator's unit tests runs on it too, with equal results (docs/emulator/contract.md).
# The files that launch PTX, be it through the cases of another module; tests/emulator/test_hardware.py checks the list.
HARDWARE_TESTS = $(sort $(shell grep -rlE --include='test_*.py' '^from tests\.emulator.*(ptx_launch|instruction_cases|mma_launch)' tests --exclude-dir=mutation))
hardware: $(VENV)/.installed-test
	EMULATOR_HW=1 $(BIN)/python -m pytest -n 8 $(HARDWARE_TESTS) $(ARGS)

# An independent static verifier on the SM100 kernels and on mutants that it must reject. docs/mutation.md
sentryward: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable '.[verify]'
	$(BIN)/python -m tests.emulator.checking.mutation.sentryward $(ARGS)

# Tensor cores of the emulator against a published model of the chips, 10^6 results of each type. docs/emulator/arithmetic.md
mmasim: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable '.[verify]'
	$(BIN)/python -m tests.emulator.mmasim_sums $(ARGS)
	$(BIN)/python -m tests.emulator.mmasim_scaled_sums $(ARGS)

# Campaigns on a Dask cluster of two processes, one of which is lost. docs/emulator/your_kernel.md
dask: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable '.[dask]'
	$(BIN)/python -m pytest tests/dask_cluster $(ARGS)

# The same on a Ray cluster of this machine. docs/emulator/your_kernel.md
ray: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable '.[ray]'
	$(BIN)/python -m pytest tests/ray_cluster $(ARGS)

# Every supported version of CuTe DSL, each in a virtual environment of its own; with ARGS=--newest one that is not yet.
dsl-versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.dsl_versions $(ARGS)

# The oldest and the newest supported torch, each in a virtual environment of its own.
torch-versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.torch_versions $(ARGS)

# The documentation as a site, site/index.html; fails if a link, an anchor or a reference leads nowhere.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file .ci/mkdocs.yml

# The pictures of docs/. The page needs Chromium (apt install chromium), or CHROMIUM=google-chrome.
CHROMIUM ?= chromium
pictures: $(VENV)/.installed-test
	@command -v $(CHROMIUM) || { echo "no $(CHROMIUM): apt install chromium, or name another by CHROMIUM=.."; exit 1; }
	$(BIN)/python docs/report_picture.py
	mkdir -p build
	$(BIN)/cute-kernels explore --batch 4736 --vary tile_n=128,256 --vary stages=2-6 --output build/page.html
	$(CHROMIUM) --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1600,1160 --screenshot=docs/explore.png build/page.html
	$(BIN)/python -c "from PIL import Image; Image.open('docs/explore.png').convert('RGB').quantize(128).save('docs/explore.png', optimize=True)"

# What an owner uploads to the package index, built and checked in fresh environments, in dist/. docs/contributing.md
release: $(VENV)-release/.installed
	$(VENV)-release/bin/python .ci/release.py $(ARGS)

# The package as a kernel of Hugging Face's hub, in dist/hub. docs/contributing.md
hub:
	$(PYTHON) .ci/hub.py $(ARGS)

# What takes too long for every change.
nightly: integrations programs $(if $(PEERS),peers) dask ray orders mutate mutate-source sanitizers fuzz sentryward mmasim dsl-versions torch-versions ptxas $(VENV)/.installed-test
	NIGHTLY=1 $(BIN)/python -m pytest -n 2 --dist worksteal --timeout 7200 $(ARGS)

# Where there is a ptxas of CUDA 13.0: opcodes whose qualifiers are drawn anew, refused here as there. docs/contributing.md
ptxas: $(VENV)/.installed-test
	$(BIN)/python -m tests.emulator.ptxas_qualifiers $(ARGS)

clean:
	rm -rf cute_kernels/emulator/core/build cute_kernels/emulator/programs/device/build $(VENV) $(VENV)-integrations $(VENV)-programs $(VENV)-peers $(VENV)-release site dist demo.png random-orders .hypothesis .pytest_cache .ruff_cache

$(VENV)/.installed-test: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed-run

$(VENV)/.installed-run: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.installed-docs: pyproject.toml .ci/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[demo,docs]'
	touch $@ $(VENV)/.installed-run

# The pinned torch gives way to the one that torchvision wants.
$(VENV)-integrations/.installed: pyproject.toml .ci/constraints.txt .ci/integrations.txt .ci/vllm.txt | $(BIN)/python
	$(BIN)/python -m venv --without-pip $(VENV)-integrations
	grep -v '^torch==' .ci/constraints.txt > $(VENV)-integrations/constraints.txt
	PIP_CONSTRAINT=$(VENV)-integrations/constraints.txt $(BIN)/python -m pip \
	  --python $(VENV)-integrations/bin/python install --quiet --editable '.[dev]' -r .ci/integrations.txt
	PIP_CONSTRAINT=$(VENV)-integrations/constraints.txt $(BIN)/python -m pip \
	  --python $(VENV)-integrations/bin/python install --quiet --no-deps -r .ci/vllm.txt
	touch $@

$(VENV)-programs/.installed: pyproject.toml .ci/constraints.txt .ci/programs.txt | $(BIN)/python
	$(BIN)/python -m venv --without-pip $(VENV)-programs
	$(BIN)/python -m pip --python $(VENV)-programs/bin/python install --quiet --editable '.[emulator]' -r .ci/programs.txt
	touch $@

$(VENV)-peers/.installed: pyproject.toml .ci/constraints.txt .ci/peers.txt | $(BIN)/python
	$(BIN)/python -m venv --without-pip $(VENV)-peers
	$(BIN)/python -m pip --python $(VENV)-peers/bin/python install --quiet --editable '.[emulator]' -r .ci/peers.txt
	touch $@

$(VENV)-release/.installed: .ci/release.txt | $(BIN)/python
	$(BIN)/python -m venv --without-pip $(VENV)-release
	$(BIN)/python -m pip --python $(VENV)-release/bin/python install --quiet -r .ci/release.txt
	touch $@

# Some distributions split ensurepip off; the system's pip then fills the environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV) || \
	  { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
