#!/bin/bash
# Runs the three daemons of a one-computer cluster.
#
#   daemons.sh up     start what does not run, return when the API answers
#   daemons.sh down   end them and every machine; nothing stays but the state
#   daemons.sh run    up, wait for Ctrl-C, down
#
# HOSTS says how many hostds run, 1 to 4, each with a home and a cache of its
# own; DRIVER and ACCEL what runs their machines (hostd --help tells).
#
# A daemon's process is known by $BERTH_HOME/run/NAME.pid: boot, process id and
# start time, so that a file of a process long gone never hits another one.
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

readonly RUN=$BERTH_HOME/run LOG=$BERTH_HOME/log KEY=$BERTH_HOME/dev.key
readonly READY_SECONDS=120 # until the API answers
readonly POOL_SECONDS=900  # until the first machines wait; emulated ones take minutes
readonly STOP_SECONDS=20   # longer than any daemon takes to drain

port() { echo "127.0.0.1:$((BERTH_PORT_BASE + $1))"; }

# host_number prints which hostd a daemon is, from 0; fails for other daemons.
host_number() { # daemon
	[[ $1 == hostd* ]] || return 1
	local n=${1#hostd}
	echo $((${n:-1} - 1))
}

# flags sets FLAGS to a daemon's flags.
flags() { # daemon
	local i
	FLAGS=(--home "$BERTH_HOME/$1" --cluster-secret "$BERTH_HOME/cluster.secret")
	case $1 in
	gateway) FLAGS+=(--listen "$BERTH_LISTEN" --raft-addr "$(port 1)" --gossip-addr "$(port 2)") ;;
	hostd*)
		i=$(host_number "$1")
		host_flags "$1"
		FLAGS=("${HOST_FLAGS[@]}" --cluster-secret "$BERTH_HOME/cluster.secret"
			--listen "$(port $((101 + 10 * i)))" --gossip-addr "$(port $((102 + 10 * i)))" --join "$(port 2)")
		[[ $i -eq 0 ]] || FLAGS+=(--name "$(uname -n)-$((i + 1))")
		;;
	proxyd)
		FLAGS+=(--listen "$(port 201)" --gossip-addr "$(port 202)" --control "$(port 203)"
			--join "$(port 2)" --egress-allow "$BERTH_EGRESS_ALLOW")
		;;
	esac
}

# host_flags sets HOST_FLAGS to what a hostd and its cleanup share. Names,
# addresses and user ids of slots come from the port base, so that two clones
# on one computer stay out of each other's way; a clone's hostds share its part.
host_flags() { # daemon
	local n=$(((BERTH_PORT_BASE / 300 + 977) % 100)) prefix=berth i # 7100, the default, gives 0
	i=$(host_number "$1")
	[[ $n -eq 0 ]] || prefix=berth$n
	[[ $i -eq 0 ]] || prefix=${prefix}h$((i + 1))
	HOST_FLAGS=(--home "$BERTH_HOME/$1" --slot-prefix "$prefix" --subnet "10.$((123 + n)).$((64 * i)).0/18"
		--uid-base "$((1048576 + n * 33554432 + i * 8388608))" --egress-allow "$BERTH_EGRESS_ALLOW"
		--image-base "$(scripts/image/build.sh --path)" --agent-layer "$(agent_layer "$BIN/agent")"
		--driver "$DRIVER" --accel "$ACCEL" --vm-files "$(scripts/image/vm.sh --path)" --template-cache "$BERTH_HOME/$1/templates")
}

# identity prints what tells a living process from all others.
identity() { # pid
	local stat fields
	stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
	read -ra fields <<<"${stat##*) }" # after "pid (name) ": state is field 3 of proc(5), the start time 22
	[[ ${fields[0]} != Z ]] || return 1
	echo "$(</proc/sys/kernel/random/boot_id) $1 ${fields[19]}"
}

# pid_of prints a running daemon's process id; fails when it does not run.
pid_of() { # daemon
	local noted pid
	noted=$(cat "$RUN/$1.pid" 2>/dev/null) || return 1
	read -r _ pid _ <<<"$noted"
	[[ -n $pid && $(identity "$pid") == "$noted" ]] || return 1
	echo "$pid"
}

start() { # daemon
	if pid_of "$1" >/dev/null; then return; fi
	flags "$1"
	[[ ! -s $LOG/$1.log ]] || mv "$LOG/$1.log" "$LOG/$1.log.old"
	( # The file is there before the daemon is: it cannot be lost track of.
		identity "$BASHPID" >"$RUN/$1.pid"
		# Nothing else that is open here, our lock or one of who called make, is
		# to be held for as long as a daemon lives.
		for fd in "/proc/$BASHPID/fd"/*; do
			[[ ${fd##*/} -lt 3 ]] || eval "exec ${fd##*/}>&-"
		done
		exec setsid "$BIN/${1%%[0-9]*}" "${FLAGS[@]}" </dev/null >"$LOG/$1.log" 2>&1
	) &
	# The same again: on a busy computer the child has not come so far yet,
	# and who looks next would take it for ended.
	identity "$!" >"$RUN/$1.pid" || true
}

stop() { # daemon
	local pid end=$((SECONDS + STOP_SECONDS))
	if pid=$(pid_of "$1"); then
		kill -TERM "$pid" 2>/dev/null || true
		while pid_of "$1" >/dev/null; do
			[[ $SECONDS -lt $end ]] || kill -KILL "$pid" 2>/dev/null || true
			sleep 0.1
		done
	fi
	rm -f "$RUN/$1.pid"
}

# down_now ends the daemons in the order in which they depend on each other,
# then the machines, which would outlive hostd to be adopted by the next one.
down_now() {
	local daemon ran=0
	for daemon in gateway "${EVERY_HOST[@]}" proxyd; do
		[[ ! -f $RUN/$daemon.pid ]] || ran=1
		stop "$daemon"
	done
	if [[ ! -d $BERTH_HOME/hostd ]]; then
		[[ $ran -eq 1 ]] || echo "Berth does not run."
		return
	fi
	[[ -x $BIN/hostd ]] || die "bin/hostd is not built, so the machines cannot be ended: run make build, then make down"
	for daemon in "${EVERY_HOST[@]}"; do
		[[ -d $BERTH_HOME/$daemon ]] || continue
		host_flags "$daemon"
		"$BIN/hostd" cleanup "${HOST_FLAGS[@]}" >"$LOG/cleanup.log" 2>&1 8>&- || {
			tail -n 20 "$LOG/cleanup.log" >&2
			die "not everything of the machines could be removed; $LOG/cleanup.log says what"
		}
	done
	echo "Berth is down; its state is in $BERTH_HOME."
}

# watch_ready waits until the API answers, a first machine of each kind waits and
# all daemons live; fails with the reason and the log that tells more.
watch_ready() {
	local daemon
	wait_for "$BASE_URL" "$READY_SECONDS" || return
	for daemon in "${DAEMONS[@]}"; do
		[[ $daemon != hostd* ]] || wait_for "http://$(port $((101 + 10 * $(host_number "$daemon"))))" "$POOL_SECONDS" || return
	done
	all_alive # not another program's answer at our address
}

# wait_for waits until a daemon says that it is ready and prints what it waits for.
wait_for() { # base URL, seconds
	local daemon said="" now end=$((SECONDS + $2))
	until now=$(curl -sS --fail-with-body --max-time 2 "$1/readyz" 2>/dev/null); do
		all_alive || return
		now=$(sed -E 's/.*"message": *"([^"]*)".*/\1/' <<<"$now")
		[[ $SECONDS -lt $end ]] || {
			for daemon in "${DAEMONS[@]}"; do show_log "$daemon"; done
			echo "berth: not ready within $2 s${now:+: $now}" >&2
			return 1
		}
		[[ -z $now || $now == "$said" ]] || echo "  … $now"
		said=$now
		sleep 0.1
	done
}

all_alive() {
	local daemon
	for daemon in "${DAEMONS[@]}"; do
		if ! pid_of "$daemon" >/dev/null; then
			show_log "$daemon"
			echo "berth: $daemon has ended" >&2
			return 1
		fi
	done
}

show_log() { # daemon
	echo "  last lines of $LOG/$1.log:" >&2
	tail -n 15 "$LOG/$1.log" | sed 's/^/    /' >&2
}

# ensure_key makes the development key once, and again when the record that
# knew it is gone.
ensure_key() {
	local code
	if [[ -s $KEY ]]; then
		code=$(printf 'header = "x-api-key: %s"\n' "$(<"$KEY")" | # not on a command line, where all users see it
			curl -sS -K - -o /dev/null -w '%{http_code}' "$BASE_URL/v1/auth/me") || true
		[[ $code == 401 ]] || return 0
	fi
	(umask 077 && "$BIN/berth" keys create --home "$BERTH_HOME/gateway" --project dev --plan scale >"$KEY.new") || return
	mv "$KEY.new" "$KEY"
}

# up_now starts what does not run. When that fails, a cluster that ran in part
# before is left as it is, with its sessions; else all is ended again.
up_now() {
	local daemon ran=0 began=$SECONDS
	mkdir -p "$LOG" "$RUN"
	chmod 0700 "$BERTH_HOME"
	for daemon in "${DAEMONS[@]}"; do
		! pid_of "$daemon" >/dev/null || ran=1
		start "$daemon"
	done
	if ! watch_ready || ! ensure_key; then
		[[ $ran -eq 1 ]] || down_now
		exit 1
	fi
	echo "  ✓ ${DAEMONS[*]}, $((SECONDS - began)) s"
}

welcome() {
	cat <<TEXT

Berth is up.

  base URL   $BASE_URL
  API key    $(<"$KEY")   (kept in $KEY)
  logs       $LOG

Try:
  export BERTH_URL=$BASE_URL BERTH_API_KEY=\$(cat $KEY)

  1. a session with browser and shell, and a command in it
     id=\$(curl -s \$BERTH_URL/v1/sessions -H "x-api-key: \$BERTH_API_KEY" -H 'content-type: application/json' \\
       -d '{"browser": true, "shell": true}' | sed -E 's/.*"id": *"([^"]+)".*/\\1/')
     curl -s \$BERTH_URL/v1/sessions/\$id/exec -H "x-api-key: \$BERTH_API_KEY" -H 'content-type: application/json' \\
       -d '{"command": "chromium --version; uname -a; id"}'
  2. browser and shell together, with times and a screenshot
     bin/berth demo
  3. your own Playwright or Puppeteer script: README.md has one to paste
TEXT
}

# run_here stays until Ctrl-C or until a daemon ends by itself.
run_here() {
	local daemon
	for daemon in "${DAEMONS[@]}"; do
		! pid_of "$daemon" >/dev/null || die "Berth runs already ($daemon); make down ends it"
	done
	trap 'trap "" INT TERM HUP; echo; echo "Stopping."; flock 8; down_now' EXIT
	trap 'exit 0' INT TERM HUP
	up_now
	welcome
	echo
	echo "Ctrl-C stops it all."
	flock -u 8 # make down may end it too
	wait -n 2>/dev/null || true
	all_alive || exit 1
}

DRIVER=${DRIVER:-auto} ACCEL=${ACCEL:-auto} HOSTS=${HOSTS:-1}
readonly EVERY_HOST=(hostd hostd2 hostd3 hostd4)
[[ $HOSTS =~ ^[1-4]$ ]] || die "HOSTS=$HOSTS: say 1 to 4"
readonly DRIVER ACCEL DAEMONS=(gateway proxyd "${EVERY_HOST[@]:0:HOSTS}")
need_root "make ${1:-}"
mkdir -p "$BERTH_HOME"
exec 8>"$BERTH_HOME/.lock"
flock -n 8 || die "another make run, up or down works on $BERTH_HOME"
case ${1:-} in
up)
	up_now
	welcome
	;;
down) down_now ;;
run) run_here ;;
*) die "daemons.sh: say up, down or run" ;;
esac
