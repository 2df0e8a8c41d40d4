# Two commands are all that a new user needs: `make demo` and `make test`. Both create .venv by themselves.
#
#   make demo      train, kill -9 one worker, resume, compare bit for bit, draw the picture
#   make demo-parallel LAYOUT=tp    the same with a transformer in a parallel layout: tp, hsdp, fsdp, pp, zero1, moe, ddp, fsdp-tp, pp-tp
#   make demo-heal      kill -9 two workers in turn under lastwords run; all ranks start again, and training goes on in a second
#   make demo-recover   kill -9 a worker, the scheduler, both and all of a dynamic cluster, and start them again
#   make demo-elastic   8 ranks train, one gets kill -9, 4 ranks go on, and one process answers
#   make test      the usual tests: four minutes on two idle cores
#   make test-ci   the other tests with processes, and those that compute for long: CI runs both
#   make test-rest the other cases of long tables: less than an hour on two idle cores
#   make test-zoo  the recipes of the zoo that make test leaves out: half an hour
#   make test-all  all of them
#   make test-readme   does what README.md says, in new environments: minutes
#   make test-gpu  the tests that need a GPU, with four ranks on the first one, over NCCL, in the python that has torch for it: PYTHON=...
#   make test-root the tests that need root, which are skipped for everyone else
#   make test-user as root: make test in a clone that belongs to a normal user, then make test-root, as CI does
#   make test-s3   a remote store that is S3, of moto, in an environment of its own
#   make screenshots   pictures of the page of lastwords serve, in build/screenshots; needs Chromium (apt: chromium-driver)
#   make deploy-check  holds the files of deploy/ against the schemas of Kubernetes, JobSet and Kubeflow Trainer, and linters
#   make dist      the wheel and the source distribution, in dist/
#   make dist-check    both, built twice and compared byte for byte, and the wheel installed with each extra in new environments
#   make messages  rewrites tests/messages.txt, which the tests compare messages with: review the difference
#   make test-torch   the core tests with other releases of torch: TORCH="2.7.1 2.14.1", each in an environment of its own
#   make check     format, lint, strict types, import contracts, generated code
#   make matrix    the full cross product of phase x victim x launcher x layout (long)
#   make chaos     kills at random instants, every other run under lastwords run: make chaos N=50 SEED=1; MODE=kill or heal for one of them, storage, pause, stranger or jobs for other trouble, heal-controller kills the controller under lastwords run, too
#   make zoo       recipes of training loops mixed at random, killed and compared: make zoo N=100 SEED=1, or CASE=...
#   make zoo-drill recipes drawn at random under lastwords drill, compared with their frozen verdicts: make zoo-drill N=30 SEED=1, or CASE=RECIPE:PHASE; without SEED, that of the last commit
#   make verdicts  runs the zoo and freezes what comes of it in tests/zoo/verdicts.json: review the difference
#   make mutants   one-line mutants of eleven files, and whether the nearest tests notice: make mutants SEED=1 N=25 WORKERS=2; without SEED, that of the last commit
#   make bench     measures the budgets, beside the machine's own limits
#   make bench-peers  kills ranks under torchrun, torchft, NVRx, DLRover, lm-resiliency and lastwords in turn: N=20; 90 minutes
#   make ci-frameworks  scripts with transformers, torchvision, lightning, torchdata, DeepSpeed and Ray Train, killed and compared: 90 processor minutes
#   make bench-month  simulates a month with failures: last words beside periodic checkpoints; seconds
#   make docs      the pages of docs/ and the README as a site, in build/site
#   make proto     writes src/lastwords/_pb from proto/*.proto
#   make clean     removes .venv and everything that was built

PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
N ?= 20
# Each worker costs 12 processor seconds before it has run a test, 4 of them for its zygote; three keep two cores busy.
WORKERS ?= 3
SEED ?= 1
MODE ?= kill,heal
LAYOUT ?= tp
TORCH ?= 2.7.1 2.14.1
TORCH_TESTS := tests/optim_wrapper tests/sharding tests/integrations $(addprefix tests/integration/test_,$(addsuffix .py,\
  kills exactness sharded_kills layouts ddp_buckets ddp_wherever negative_controls own_loop dcp))

.PHONY: install venv screenshots demo demo-parallel demo-heal demo-recover demo-elastic test test-ci test-rest test-zoo test-all test-torch test-s3 messages check matrix chaos zoo zoo-drill verdicts bench bench-peers ci-frameworks bench-month docs proto clean mutants test-root test-gpu test-readme test-user deploy-check dist dist-check
.DELETE_ON_ERROR:

install venv: $(READY)

# constraints.txt pins every version, torch's included: without the pin, pip would take the newest build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,demo,page,docs]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m demo.run $(ARGS)

demo-parallel: $(READY)
	$(BIN)/python -m demo.transformer.run --layout $(LAYOUT) $(ARGS)

demo-heal: $(READY)
	$(BIN)/python -m demo.heal $(ARGS)

demo-recover: $(READY)
	$(BIN)/python -m demo.recover $(ARGS)

demo-elastic: $(READY)
	$(BIN)/python -m demo.transformer.elastic $(ARGS)

# Bytecode is written even where the environment says not to: each test process would compile the same modules again.
test test-ci test-rest test-zoo test-all: export PYTHONDONTWRITEBYTECODE =
test: SELECTED = not slow and not thorough and not ci
test-ci: SELECTED = ci and not slow and not thorough
test-rest test-zoo: SELECTED = thorough and not slow
OF =
test-rest: OF = --ignore=tests/zoo
test-zoo: OF = tests/zoo
test-all: SELECTED = not slow
test test-ci test-rest test-zoo test-all: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m '$(SELECTED)' --durations=20 $(OF) $(ARGS)

test-root: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'root and not slow' $(ARGS) $$(grep -rlF @pytest.mark.root tests)

# The environment that `make install` makes has torch for the CPU alone.
test-gpu:
	PYTHONPATH=$(CURDIR):$(CURDIR)/src OMP_NUM_THREADS=1 PYTORCH_NVML_BASED_CUDA_CHECK=1 $(PYTHON) -m pytest -m gpu -n $(WORKERS) $(ARGS) \
	  $$(grep -rlF pytest.mark.gpu --include=test_*.py tests)

test-readme: $(READY)
	$(BIN)/python -m pytest -m readme $(ARGS) $$(grep -rlF pytest.mark.readme tests)

test-user:
	tools/as_user.sh test

messages: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.golden -n $(WORKERS) --dist worksteal $(ARGS)

# Builds of torch with CUDA are what the registry has beside the pinned one: some 5 GB for each release.
test-torch: $(TORCH:%=.venv-torch-%/.ready)
	@for release in $(TORCH); do \
	  echo "torch $$release"; \
	  OMP_NUM_THREADS=1 .venv-torch-$$release/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow and not thorough' \
	    $(TORCH_TESTS) $(ARGS) || exit 1; \
	done

.venv-torch-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed 's/^torch==.*/torch==$*/' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt -e '.[dev,demo]'
	@touch $@

test-s3: .venv-s3/.ready
	OMP_NUM_THREADS=1 .venv-s3/bin/python -m pytest -q tests/integration/test_remote_s3.py $(ARGS)

# Of its own, because s3fs needs an older python-dateutil than the pinned one, which is matplotlib's.
.venv-s3/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed '/^python-dateutil==/d' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install -c $(@D)/constraints.txt -e '.[dev,s3]'
	@touch $@

screenshots: $(READY)
	PAGE_PICTURES=$(CURDIR)/build/screenshots OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS) tests/integration/test_page_in_browser.py

deploy-check: .venv-deploy/.ready
	.venv-deploy/bin/python -m pytest -q tests/test_deploy.py $(ARGS)

.venv-deploy/.ready: pyproject.toml constraints.txt deploy/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -c constraints.txt -e '.[dev]' -r deploy/requirements.txt
	@touch $@

# The same bytes from the same commit, whenever and wherever: the time is the commit's.
dist dist-check: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: $(READY)
	rm -rf build dist
	$(BIN)/python tools/build_dist.py dist

dist-check: $(READY)
	$(BIN)/python -m pytest -q -m dist $(ARGS) tests/test_packaging.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_proto.py --venv $(VENV)/generator --check

matrix: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -k 'not chaos' --timeout 7200 $(ARGS)

chaos: $(READY)
	OMP_NUM_THREADS=1 LASTWORDS_CHAOS_N=$(N) LASTWORDS_CHAOS_SEED=$(SEED) LASTWORDS_CHAOS_MODE=$(MODE) $(BIN)/python -m pytest -m slow -k 'chaos and many' --timeout 7200 $(ARGS)

zoo: $(READY)
	OMP_NUM_THREADS=1 LASTWORDS_ZOO_N=$(N) LASTWORDS_ZOO_SEED=$(SEED) LASTWORDS_ZOO_CASE='$(CASE)' $(BIN)/python -m pytest -n $(WORKERS) -m slow -k 'zoo and mixture' --timeout 7200 $(ARGS)

# Without a seed of its own, each commit draws others.
zoo-drill: SEED =
zoo-drill: N = 30
zoo-drill: $(READY)
	OMP_NUM_THREADS=1 LASTWORDS_ZOO_N=$(N) LASTWORDS_ZOO_SEED=$(SEED) LASTWORDS_ZOO_CASE='$(CASE)' $(BIN)/python -m pytest -m slow tests/zoo/test_drilled.py --timeout 7200 $(ARGS)

verdicts: $(READY)
	rm -f .zoo-results.jsonl
	LASTWORDS_ZOO_RESULTS=$(CURDIR)/.zoo-results.jsonl $(MAKE) test-all ARGS='tests/zoo/test_zoo.py tests/zoo/test_periodic.py $(ARGS)' || true
	$(BIN)/python -m tests.zoo.frozen .zoo-results.jsonl

# Without a seed of its own, each commit has another one.
mutants: N = 25
mutants: WORKERS = 2
mutants: SEED =
mutants: $(READY)
	$(BIN)/python tools/mutants.py -n $(N) --workers $(WORKERS) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: $(READY)
	$(BIN)/python bench/run.py $(ARGS)

# Warnings (a link or an anchor that leads nowhere) are errors.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench-month: $(READY)
	$(BIN)/python -m bench.month $(ARGS)

# The other systems are in an environment of their own, beside the same torch.
ci-frameworks: .venv-frameworks/.ready
	OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m pytest -m slow --timeout 7200 tests/frameworks $(ARGS)

.venv-frameworks/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -c constraints.txt -e '.[dev,hf,lightning]' torchdata==0.11.0 peft==0.21.2 'ray[train]==2.60.0'
	$(@D)/bin/python -m pip install -c constraints.txt hjson py-cpuinfo einops msgpack ninja pillow pydantic psutil setuptools
	DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --no-deps --no-build-isolation deepspeed==0.19.8
	$(@D)/bin/python -m pip install --no-deps --target $(@D)/torchvision torchvision==0.28.0
	touch $@

bench-peers: .venv-peers/.ready
	.venv-peers/bin/python -W ignore -m bench.peers.bench_peers --n $(N) $(ARGS)

.venv-peers/.ready: pyproject.toml constraints.txt bench/peers/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -c constraints.txt -e . matplotlib -r bench/peers/requirements.txt
	@touch $@

proto: $(READY)
	$(BIN)/python tools/generate_proto.py --venv $(VENV)/generator

clean:
	rm -rf $(VENV) .venv-torch-* .venv-s3 .venv-deploy .venv-peers .venv-frameworks build dist src/lastwords.egg-info demo/out demo/disaster_recover/out bench/out ttp_checkpoints
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
