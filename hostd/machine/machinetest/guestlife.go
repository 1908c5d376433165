package machinetest

import (
	"strings"

	"github.com/berth-dev/berth/shared/session"
)

// sudoWorks: the ordinary user becomes root of the machine, and of it only.
func sudoWorks(r *Rig) {
	m := r.Start(r.Spec())
	reply, err := Ask(r.Context(), m, "sh", "sudo -n bash -c 'id -u; echo changed > /etc/changed; chown nobody /etc/changed; stat -c %U /etc/changed'", 1000)
	if err != nil || strings.Join(strings.Fields(reply.Text), " ") != "0 nobody" {
		r.Errorf("sudo gave %q with code %d (%v)", reply.Text, reply.Code, err)
	}
}

// chromeConfinesItself: Chromium as the ordinary user runs with its own
// confinement on: a renderer sits in pid namespaces of its own and has more
// system call filters than the machine's one.
func chromeConfinesItself(r *Rig) {
	spec := r.Spec()
	spec.Kind, spec.Size = session.Both, session.DefaultSizes[session.Both]
	spec.DiskBytes, spec.Pids = 1<<30, 1024
	m := r.Start(spec)
	if err := m.Promote(r.Context()); err != nil {
		r.Error(err)
	}
	script := `export HOME=/home/user; cd
chromium --headless=new --disable-gpu --disable-background-networking --disable-component-update --disable-sync \
  --no-first-run --user-data-dir=/tmp/profile about:blank >/tmp/chrome.log 2>&1 &
for i in $(seq 300); do
  for p in /proc/[0-9]*; do
    if { tr '\0' ' ' < $p/cmdline; } 2>/dev/null | grep -q '^/usr/lib/chromium/[^ ]* .*--type=renderer'; then
      echo renderer $(grep NSpid: $p/status | wc -w) $(grep Seccomp_filters: $p/status | cut -f2) $(grep NoNewPrivs: $p/status | cut -f2)
      exit 0
    fi
  done
  sleep 0.1
done
cat /tmp/chrome.log; exit 1`
	reply, err := Ask(r.Context(), m, "sh", script, 1000)
	if err != nil || reply.Code != 0 {
		r.Fatalf("no renderer (%v): %s", err, reply.Text)
	}
	// "NSpid:" and three pids: the machine's and two of Chrome's.
	fields := strings.Fields(reply.Text)
	if len(fields) != 4 || lessThan(fields[1], 3) || lessThan(fields[2], 2) || fields[3] != "1" {
		r.Errorf("a renderer's pids, filters, no-new-privileges: %q", reply.Text)
	}
	r.Stop(m)
	r.WantNothing()
}
