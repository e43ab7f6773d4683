# Two commands need nothing prepared: make demo, make test. CMake does the work underneath (CMakePresets.json).
.PHONY: help build demo test bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train two networks in less memory than they need, and see what it costs (about 5 minutes)"
	@echo "make test    run all tests, C and Python (about 25 minutes)"
	@echo "make build   build/release/bin/cairn, build/release/lib/libcairn.so, the Python package in .venv"
	@echo "make bench   run the benchmarks"
	@echo "make docs    build the documentation as a site, in build/site"
	@echo "make clean   remove what was built; .venv stays (remove it by hand)"
	@echo "Each sets up what it needs, the first time, and says so. bash .ci/run runs the tests and all gates."

build:
	@tools/bootstrap build

demo:
	@tools/bootstrap demo
	@.venv/bin/python demo/run.py

test:
	@tools/bootstrap test
	@tools/run_tests

bench:
	@tools/bootstrap demo
	@.venv/bin/python tools/run_benchmarks.py

docs:
	@tools/build_docs

clean:
	rm -rf build dist demo-out
	rm -f .venv/.cairn-package
