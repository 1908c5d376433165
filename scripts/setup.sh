#!/bin/bash
# Sets up what Berth needs and the machine lacks: system packages, the guest
# image, the binaries. What is there already is skipped, so that a second call
# takes no time.
#
#   setup.sh run     to run Berth (binaries in bin/)
#   setup.sh test    to test it (race-checked binaries in bin/race/)
#   setup.sh bench   to measure it (the tools of test, the binaries of run)
#   setup.sh image   only the guest image and the agent's layer
#   setup.sh build   only the binaries
#
# With DRIVER=microvm, on processors with virtualisation, and for test and bench,
# also QEMU and what microVMs boot from.
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# A command and the Debian package that brings it.
readonly RUN_TOOLS='runc:runc mmdebstrap:mmdebstrap nft:nftables ip:iproute2 mkfs.ext4:e2fsprogs mount:mount
	setsid:util-linux curl:curl openssl:openssl'
readonly VM_TOOLS='qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils cpio:cpio'
readonly TEST_TOOLS='gcc:gcc,libc6-dev node:nodejs npm:npm git:git chromium:chromium
	tinyproxy:tinyproxy-bin squid:squid haproxy:haproxy'

# lacking prints the packages of those commands that are not here.
lacking() { # command:package...
	local tool
	for tool in "$@"; do
		command -v "${tool%%:*}" >/dev/null || tr ',' '\n' <<<"${tool#*:}"
	done
}

install_packages() { # package...
	command -v apt-get >/dev/null ||
		die "these are missing and there is no apt-get to install them with: $*"
	export DEBIAN_FRONTEND=noninteractive
	# Programs are wanted, not services: a proxy of everybody's on this computer.
	if [[ ! -e /usr/sbin/policy-rc.d ]]; then
		trap 'rm -f /usr/sbin/policy-rc.d' EXIT
		printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
		chmod 0755 /usr/sbin/policy-rc.d
	fi
	apt-get update
	apt-get install -y --no-install-recommends "$@"
}

need_go() {
	local want have
	want=$(sed -n 's/^go //p' go.mod)
	command -v go >/dev/null || die "Go $want or newer is needed and not in PATH: see https://go.dev/dl/"
	have=$(go env GOVERSION) || die "Go $want or newer is needed: see https://go.dev/dl/"
	printf '%s\n%s\n' "$want" "${have#go}" | sort -C -V ||
		die "Go $want or newer is needed, this is ${have#go}: see https://go.dev/dl/"
}

# build_static makes the product: no C library, so that one agent fits any guest.
build_static() {
	export CGO_ENABLED=0
	compile "$BIN"
}

# build_race makes what tests run; its agent needs the guest to have a C
# library no older than this computer's, which Debian 12 has on Debian 12.
build_race() {
	compile "$BIN/race" -race
	# Emulated machines, and going through their memory page by page, are slow
	# enough without the race detector: containers have the checked ones.
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$BIN/race/agent-static" ./hostd/agent
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$BIN/race/hostd-static" ./hostd
}

compile() { # folder, flags...
	local into=$1
	shift
	mkdir -p "$into"
	set -- -trimpath -buildvcs=false "$@"
	go build "$@" -o "$into/" ./gateway ./hostd ./proxyd ./hostd/agent
	go build "$@" -o "$into/berth" ./gateway/cli
}

# install_clients brings the real clients of scripts/conformance; they run no
# scripts of their own and download no browser.
install_clients() {
	npm ci --prefix scripts/conformance --cache "$BERTH_CACHE/npm" --ignore-scripts --no-audit --no-fund
}

# clients_lacking says whether they are absent or older than their lock file.
clients_lacking() {
	[[ scripts/conformance/package-lock.json -nt scripts/conformance/node_modules/.package-lock.json ]]
}

# lay_agent makes the layer that puts an agent into the guest.
lay_agent() { # binary
	local layer new
	layer=$(agent_layer "$1")
	[[ ! -f $layer/usr/lib/berth/agent ]] || return 0
	mkdir -p "$BERTH_CACHE/agent"
	new=$(mktemp -d "$BERTH_CACHE/agent/.new.XXXXXX")
	install -d -m 0755 "$new" "$new/usr" "$new/usr/lib" "$new/usr/lib/berth"
	install -m 0755 "$1" "$new/usr/lib/berth/agent"
	sync -f "$new"
	mv -T "$new" "$layer" 2>/dev/null || rm -rf "$new" # another setup was first
	[[ -f $layer/usr/lib/berth/agent ]] || die "cannot make $layer"
}

what=${1:-run}
case $what in
run) tools=$RUN_TOOLS ;;
test | bench) tools="$RUN_TOOLS $TEST_TOOLS" ;;
image) tools=$RUN_TOOLS ;;
build) tools='' ;;
*) die "setup.sh: $what is none of run, test, bench, image, build" ;;
esac
[[ $what == build ]] || need_root "make ${BERTH_TARGET:-$what}"
need_go

vm='' # not empty: microVMs too
case $what in
test | bench) vm=1 ;;
run | image)
	case ${DRIVER:-auto} in
	microvm) vm=1 ;;
	auto) ! grep -qE '^flags.* (vmx|svm)( |$)' /proc/cpuinfo || vm=1 ;; # where hostd will want it
	esac
	;;
esac
[[ -z $vm ]] || tools+=" $VM_TOOLS"

# shellcheck disable=SC2086 # both are lists
packages=$(lacking $tools)
if [[ -n $packages ]]; then
	# shellcheck disable=SC2086
	begin "system packages" install_packages $packages
	finish
fi

# Alongside: it keeps one core busy.
if [[ -n $vm && ! -d $(scripts/image/vm.sh --path) ]]; then
	begin "guest image and kernel" scripts/image/vm.sh
elif [[ $what != build && ! -d $(scripts/image/build.sh --path) ]]; then
	begin "guest image" scripts/image/build.sh
fi
case $what in
test | bench)
	if clients_lacking; then begin "test clients" install_clients; fi
	;;
esac
case $what in
test) begin "race-checked binaries" build_race ;;
*) begin "binaries" build_static ;;
esac
finish

case $what in
test)
	lay_agent "$BIN/race/agent"
	lay_agent "$BIN/race/agent-static"
	;;
build) ;;
*) lay_agent "$BIN/agent" ;;
esac
if [[ $what == image ]]; then
	echo "BERTH_IMAGE_BASE=$(scripts/image/build.sh --path)"
	echo "BERTH_AGENT_LAYER=$(agent_layer "$BIN/agent")"
	[[ -z $vm ]] || echo "BERTH_VM_FILES=$(scripts/image/vm.sh --path)"
fi
