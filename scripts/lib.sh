# What the scripts share: settings, paths, progress. Source it; it leaves the
# shell in the repository's root, strict, and with every setting exported.
# shellcheck shell=bash disable=SC2034 # used by those who source this
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
export PATH="$PATH:/usr/local/go/bin:/usr/sbin:/sbin" # root's PATH often lacks the last two

export BERTH_HOME=${BERTH_HOME:-/var/lib/berth}
export BERTH_CACHE=${BERTH_CACHE:-/var/cache/berth}
export BERTH_LISTEN=${BERTH_LISTEN:-127.0.0.1:8080}
export BERTH_EGRESS_ALLOW=${BERTH_EGRESS_ALLOW:-}
export BERTH_PORT_BASE=${BERTH_PORT_BASE:-7100} # another clone takes one 300 or more away, and another BERTH_LISTEN
readonly ROOT BASE_URL=http://$BERTH_LISTEN BIN=$ROOT/bin

die() {
	echo "berth: $*" >&2
	exit 1
}

need_root() { # what
	[[ $EUID -eq 0 ]] ||
		die "$1 needs root (it makes namespaces, mounts and firewall rules): run it again as root, for example: sudo -E env PATH=\"\$PATH\" $1"
}

# agent_layer prints the folder that is laid over the guest image to put this
# agent into it. Its name is the agent's hash, so a layer in use never changes.
agent_layer() { # binary
	local sum
	sum=$(sha256sum "$1")
	echo "$BERTH_CACHE/agent/${sum%% *}"
}

# Steps run in the background, several at once, and report when they end. A
# step's output goes to a log that is shown only when it fails.
declare -A step_pid=() step_log=() step_began=()
LOGS=""

begin() { # name, command...
	local name=$1
	shift
	[[ -n $LOGS ]] || LOGS=$(mktemp -d "${TMPDIR:-/tmp}/berth-setup.XXXXXX")
	step_log[$name]=$LOGS/${name// /-}.log
	step_began[$name]=$SECONDS
	set -m # its own process group, so that all of it can be ended
	(set +m; "$@") </dev/null >"${step_log[$name]}" 2>&1 &
	step_pid[$name]=$!
	set +m
	trap end_steps EXIT
	trap 'exit 130' INT TERM HUP
}

# finish waits for all steps; the first failure shows its log and ends the script.
finish() {
	local name line start=$SECONDS said=$SECONDS
	while [[ ${#step_pid[@]} -gt 0 ]]; do
		for name in "${!step_pid[@]}"; do
			kill -0 "${step_pid[$name]}" 2>/dev/null || report "$name"
		done
		[[ ${#step_pid[@]} -gt 0 ]] || break
		line="  … $(printf '%s, ' "${!step_pid[@]}")$((SECONDS - start)) s"
		if [[ -t 1 ]]; then
			printf '\r\e[K%s' "$line"
		elif ((SECONDS - said >= 30)); then
			said=$SECONDS
			echo "$line"
		fi
		sleep 0.2
	done
}

report() { # name of a step that ended
	local name=$1 pid=${step_pid[$1]} code=0
	unset "step_pid[$name]"
	wait "$pid" || code=$?
	[[ ! -t 1 ]] || printf '\r\e[K'
	if [[ $code -ne 0 ]]; then
		echo "  ✗ $name failed after $((SECONDS - step_began[$name])) s; its output:" >&2
		tail -n 60 "${step_log[$name]}" | sed 's/^/    /' >&2
		exit 1
	fi
	echo "  ✓ $name, $((SECONDS - step_began[$name])) s"
}

end_steps() {
	local pid
	for pid in "${step_pid[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
	for pid in "${step_pid[@]}"; do wait "$pid" 2>/dev/null || true; done
	[[ -z $LOGS ]] || rm -rf "$LOGS"
}
