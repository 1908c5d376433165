# Berth. `make` alone lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
export HOSTS DRIVER ACCEL
.PHONY: help run up down demo image build test lint bench soak generate

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## set up everything, run Berth here; Ctrl-C ends it and leaves nothing behind
	@BERTH_TARGET=run scripts/setup.sh run && exec scripts/daemons.sh run

up: ## the same in the background; returns when the API answers
	@BERTH_TARGET=up scripts/setup.sh run && exec scripts/daemons.sh up

down: ## end what up started, and every machine
	@scripts/daemons.sh down

demo: up ## create a session, open a page, click, take a screenshot; needs no internet (Berth stays up)
	@. scripts/lib.sh && exec bin/berth demo

image: ## build the guest image and the agent's layer, print where they are
	@scripts/setup.sh image

build: ## build gateway, hostd, proxyd, berth and agent into bin/
	@scripts/setup.sh build

test: ## set up and pass all tests: unit, contract, end to end, real clients
	@scripts/test.sh

soak: ## the tests of moves, pauses and clones at length, not for every change
	@scripts/soak.sh

lint: ## check gofmt, vet, staticcheck, generated files, shell scripts
	@scripts/lint.sh

bench: ## measure, and compare with what each figure stands beside
	@BERTH_TARGET=bench scripts/setup.sh bench && exec scripts/bench/run.sh

generate: ## make generated files anew
	go generate ./...
