#!/bin/bash
# Builds the guest image, a plain Debian root folder owned by the host's ids
# (drivers shift them), and prints where it is. The folder's name is the hash
# of its recipe, the files beside this one; once there it never changes, so a
# second call only prints. Usage: build.sh [--path], which prints and builds
# nothing. Needs root and mmdebstrap.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${BERTH_CACHE:-/var/cache/berth}/image
recipe=$(cd "$here" && cat build.sh customize.sh packages.txt | sha256sum | cut -c1-16)
image=$cache/$recipe

if [[ ${1:-} == --path || -d $image/rootfs ]]; then
	echo "$image/rootfs"
	exit 0
fi

# mirror prints where this host's apt gets a Debian suite from. Signatures are
# checked with Debian's keys whatever it says.
mirror() { # suite, archive (debian or debian-security)
	local uri
	uri=$(apt-get update --print-uris 2>/dev/null |
		sed -nE "s#^'(https?://.*/$2)/dists/$1/InRelease'.*#\1#p" | head -n 1)
	[[ -n $uri ]] || {
		echo "berth: apt on this host has no source for $1: add one to /etc/apt/sources.list" >&2
		return 1
	}
	echo "deb $uri $1 main"
}

# host_apt prints the settings that say how this host reaches its mirror.
host_apt() {
	apt-config dump | grep -E '^Acquire::((http|https)::|Check-Valid-Until |Check-Date |Retries )' |
		sed 's/;$//' || true
}

build() { # folder
	local -a options=()
	local line main updates security
	main=$(mirror bookworm debian)
	updates=$(mirror bookworm-updates debian)
	security=$(mirror bookworm-security debian-security)
	while read -r line; do options+=(--aptopt="$line"); done < <(host_apt)
	# What nobody reads in a machine; the copyright notices stay.
	for line in man info lintian locale doc; do
		options+=(--dpkgopt="path-exclude=/usr/share/$line/*")
	done
	mmdebstrap --mode=root --variant=minbase --format=directory "${options[@]}" \
		--aptopt='Acquire::Languages "none"' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
		--include="$(sed 's/#.*//' "$here/packages.txt" | xargs | tr ' ' ,)" \
		--customize-hook="bash '$here/customize.sh' \"\$1\"" \
		bookworm "$1/rootfs" "$main" "$updates" "$security"
	# A driver mounts its own; only the mount point stays.
	rm -rf --one-file-system "$1/rootfs/dev"
	mkdir -m 0755 "$1/rootfs/dev"
}

[[ $EUID -eq 0 ]] || { echo "berth: building the guest image needs root" >&2; exit 1; }
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9 # two clones may share the cache
if [[ ! -d $image/rootfs ]]; then
	new=$cache/.new
	rm -rf --one-file-system "$new" # of a build that was cut off
	mkdir -m 0755 "$new"
	build "$new" >&2 9>&-
	sync -f "$new"
	mv -T "$new" "$image"
	sync -f "$cache"
fi
echo "$image/rootfs"
