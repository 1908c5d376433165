#!/bin/bash
# The tests of moves, pauses and clones, with more rounds of everything: a move
# every few seconds for five minutes, 200 starts, daemons that die at other
# moments each time. BERTH_SOAK is all that differs from make test.
set -euo pipefail
export BERTH_SOAK=1
exec "$(dirname "${BASH_SOURCE[0]}")/test.sh" -v -timeout 120m "$@" ./scripts/e2e/moves
