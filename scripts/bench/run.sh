#!/bin/bash
# Measures Berth on a stack of its own and prints the table of figures.
# Usage: run.sh [-quick] [-only ROW,...]; rows: create lifecycle evaluate exec
# file burst memory egress crash, of containers; start clone pause move resume, of
# microVMs on two hosts. make bench sets up what it needs, but for nginx, which
# only this brings.
export BERTH_BENCH=1
# A developer's own stack is none of the bench's business.
unset BERTH_URL BERTH_API_KEY BERTH_POOL
BERTH_HOME=$(mktemp -d "${TMPDIR:-/tmp}/berth-bench.XXXXXX")
export BERTH_HOME BERTH_PORT_BASE=9700 BERTH_LISTEN=127.0.0.1:9790 BERTH_EGRESS_ALLOW=10.219.77.1/32
# shellcheck source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
need_root "make bench"

cleanup() {
	scripts/daemons.sh down >/dev/null 2>&1 || true
	rm -rf --one-file-system "$BERTH_HOME"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

if ! command -v nginx >/dev/null; then
	begin "nginx" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
		sh -c 'apt-get update && apt-get install -y --no-install-recommends nginx' # RUNLEVEL: installed, not started
	finish
	trap cleanup EXIT
fi
export BERTH_IMAGE_BASE
BERTH_IMAGE_BASE=$(scripts/image/build.sh --path)
go build -trimpath -buildvcs=false -o "$BERTH_HOME/bench" ./scripts/bench
"$BERTH_HOME/bench" "$@"
