# Tests by what they need; `python -m pytest` alone runs the quick part.
PYTEST = python -m pytest -n 3 --dist worksteal -rs

quick:
	$(PYTEST)
smoke faults launch gpu oldest:
	$(PYTEST) -m $@
cudalab: # CUDA and NCCL code on an emulation; which planted faults were caught; lines that no test has executed
	rm -f tests/cudalab/.build/lines tests/cudalab/.build/faults
	mkdir -p tests/cudalab/.build
	CUDALAB_COVER="$(CURDIR)/tests/cudalab/.build/lines:benchmarks,common,harness,examples" \
		$(PYTEST) -n 2 -m $@ tests/test_cudalab.py tests/test_plain_loops.py
	cat tests/cudalab/.build/faults
	python tests/cudalab_lines.py tests/cudalab/.build/lines
mutations: # which of the planted mistakes the tests notice, 20 minutes
	python tests/mutations.py
all: quick smoke faults launch
lint:
	ruff check .
	ruff format --check .
	mypy common harness readers benchmarks analysis examples launch tests
pyz: # all scripts in one file, torchrun-bench.pyz
	python launch/archive/build.py
results: # repeat the measurements in docs/results, 20 minutes
	python tests/measure_results.py
.PHONY: pyz results mutations quick smoke faults launch gpu oldest cudalab all lint
