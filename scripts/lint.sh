#!/bin/bash
# Checks form: gofmt, vet, staticcheck, generated files, shell scripts.
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

failed=0
check() { # name, command...
	local name=$1 out
	shift
	if out=$("$@" 2>&1); then
		echo "  ✓ $name"
	else
		echo "  ✗ $name" >&2
		sed 's/^/    /' <<<"$out" >&2
		failed=1
	fi
}

# ours prints the project's files of these patterns, each ended by a zero byte.
ours() {
	local file
	git ls-files -z --cached --others --exclude-standard -- "$@" | while IFS= read -r -d '' file; do
		[[ ! -f $file ]] || printf '%s\0' "$file" # one deleted and not yet committed is still listed
	done
}

# quiet fails when a command says anything.
quiet() {
	local out
	out=$("$@" 2>&1)
	[[ -z $out ]] || { echo "$out"; return 1; }
}

unformatted() { ours '*.go' | xargs -0 gofmt -l; }

# Generating again must change nothing; what did change is left for a commit.
stale() {
	local before after
	before=$(generated)
	go generate ./... 2>&1 | sed '/^go: downloading/d'
	after=$(generated)
	diff <(echo "$before") <(echo "$after") | sed -n 's/^> [0-9a-f]*  /stale or new: /p'
}

generated() { ours '*.go' | xargs -0 grep -lE '^// Code generated .* DO NOT EDIT\.$' | sort | xargs -r sha256sum; }

shell() {
	local script
	local -a scripts
	mapfile -t scripts < <(ours '*.sh' .ci/run | tr '\0' '\n')
	for script in "${scripts[@]}"; do bash -n "$script" || return; done
	# Not every computer has shellcheck; where it is, it counts.
	! command -v shellcheck >/dev/null || shellcheck --severity=warning -x -P SCRIPTDIR "${scripts[@]}"
}

check gofmt quiet unformatted
check "go vet" go vet ./...
check staticcheck go tool staticcheck ./...
check "generated files" quiet stale
check "shell scripts" shell
exit "$failed"
