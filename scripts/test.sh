#!/bin/bash
# Runs all tests, with the race detector, against real parts; one that is
# missing fails (CI=true) instead of skipping. Arguments go to go test: others
# than all packages within the usual time.
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

BERTH_TARGET="test" scripts/setup.sh test

# What a developer set for the own cluster is none of the tests' business.
unset BERTH_HOME BERTH_LISTEN BERTH_EGRESS_ALLOW BERTH_PORT_BASE BERTH_URL BERTH_API_KEY
export CI=true BERTH_E2E=1 BERTH_BIN=$BIN/race BERTH_IMAGE_BASE BERTH_AGENT_LAYER BERTH_VM_FILES BERTH_VM_AGENT_LAYER
BERTH_IMAGE_BASE=$(scripts/image/build.sh --path)
BERTH_AGENT_LAYER=$(agent_layer "$BIN/race/agent")
BERTH_VM_FILES=$(scripts/image/vm.sh --path)
BERTH_VM_AGENT_LAYER=$(agent_layer "$BIN/race/agent-static")

# -count=1: the cache cannot see image, daemons and kernel.
[[ $# -eq 0 ]] || { go test -race -count=1 "$@"; exit; }

# What boots machines, starts whole clusters or makes network links has the
# computer to itself: beside each other they wait for the processors for longer
# than clients do, and a Chrome of the host's loses its pages when links change.
readonly ALONE='/(scripts/(e2e|conformance)|hostd/(machine|network))(/|$)'
code=0
go list ./... | grep -vE "$ALONE" | xargs go test -race -count=1 -timeout 25m || code=1
go list ./... | grep -E "$ALONE" | xargs go test -race -count=1 -timeout 25m -p 1 || code=1
exit "$code"
