package machinetest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/hostd/machine"
)

// memoryLimit: a hog dies, its agent and its neighbour do not.
func memoryLimit(r *Rig) {
	hog, neighbour := r.Start(r.Spec()), r.Start(r.Spec())
	// tail keeps the last line, and there is no newline in 4 GiB.
	if reply := r.Ask(hog, "sh", "head -c 4G /dev/zero | tail > /dev/null; exit ${PIPESTATUS[1]}"); reply.Code != 137 {
		r.Errorf("a hog of 4 GiB ended with %d in a machine of 1 GiB: %s", reply.Code, reply.Text)
	}
	r.stillFine(hog, neighbour)
	// /dev/shm counts too.
	if reply := r.Ask(hog, "sh", "dd if=/dev/zero of=/dev/shm/x bs=1M count=2000 2>&1"); reply.Code == 0 {
		r.Error("wrote 2 GB to /dev/shm")
	}
	r.stillFine(hog, neighbour)
}

const forkBomb = "b() { b | b & }; b; sleep 1000"

// pidsLimit: a fork bomb of the ordinary user harms neither neighbour nor agent.
func pidsLimit(r *Rig) {
	bomb, neighbour := r.Start(r.Spec()), r.Start(r.Spec())
	go func() { _, _ = Ask(r.Context(), bomb, "sh", forkBomb, 1000) }() // ends with the machine
	slot := bomb.Handle().Spec.Slot
	r.Until("the bomb fills its limit", func() bool { all, _ := r.pids(slot); return len(all) > 150 })
	for range 20 {
		if all, _ := r.pids(slot); len(all) > 256 {
			r.Errorf("%d processes in a machine of 256", len(all))
		}
	}
	r.stillFine(neighbour)
	if got := r.Ask(bomb, "echo", "alive"); got.Text != "alive" {
		r.Errorf("the agent gave %q", got.Text)
	}
}

func diskLimit(r *Rig) {
	full, neighbour := r.Start(r.Spec()), r.Start(r.Spec())
	for _, dir := range []string{"/workspace", "/tmp", "/root"} { // one limit for all
		reply := r.Ask(full, "sh", "cat /dev/zero > "+dir+"/zeros 2>/tmp/says || cat /tmp/says; df --output=size -B1M / | tail -1")
		if size, err := strconv.Atoi(lastField(reply.Text)); err != nil || size > 256 {
			r.Errorf("%s: a disk of 256 MiB has %q MiB", dir, reply.Text)
		}
	}
	used := r.Sh(full, "cat /workspace/zeros /tmp/zeros /root/zeros | wc -c")
	if bytes, err := strconv.Atoi(used); err != nil || bytes > 256<<20 || bytes < 150<<20 {
		r.Errorf("%s bytes fitted onto a disk of 256 MiB", used)
	}
	if got := r.Ask(full, "echo", "alive"); got.Text != "alive" {
		r.Errorf("the agent gave %q", got.Text)
	}
	r.stillFine(neighbour)
	r.Sh(full, "rm -f /workspace/zeros /tmp/zeros /root/zeros; echo again > /workspace/again")
}

func lastField(s string) string {
	fields := strings.Fields(s)
	if len(fields) == 0 {
		return ""
	}
	return fields[len(fields)-1]
}

// hostileAttempts: what root inside must not manage.
func hostileAttempts(r *Rig) {
	m := r.Start(r.Spec())
	for _, attempt := range []string{
		"mount", "remount", "mountInOwnNamespace", "newMountAPI", "module", "netfilter", "packetSocket", "deviceNode",
		"hostname", "clock", "reboot", "linkUp", "bpf", "keyctl", "perf", "ioUring", "userfaultfd", "openByHandle", "sysctl", "sysrq",
	} {
		reply := r.Ask(m, attempt, "")
		switch errno := syscall.Errno(reply.Code); errno {
		case syscall.EPERM, syscall.EACCES, syscall.ENOSYS, syscall.EROFS, syscall.ENOENT:
		default:
			r.Errorf("%s: %q (%d)", attempt, reply.Text, reply.Code)
		}
	}
}

// confinement: what a machine sees and what of it others see.
func confinement(r *Rig) {
	a, b := r.Start(r.Spec()), r.Start(r.Spec())
	base := a.Handle().Spec.Slot.UIDBase
	if got, want := strings.Fields(r.Sh(a, "cat /proc/self/uid_map; cat /proc/self/gid_map")),
		strings.Fields(fmt.Sprintf("0 %d 65536 0 %d 65536", base, base)); strings.Join(got, " ") != strings.Join(want, " ") {
		r.Errorf("ids inside are mapped %v, want %v", got, want)
	}
	if got := r.Sh(a, "ls -d /proc/[0-9]* | wc -l"); lessThan(got, 1) || !lessThan(got, 8) {
		r.Errorf("%s processes are visible inside", got)
	}
	if got := r.Sh(a, "cat /proc/*/mountinfo /proc/*/environ 2>/dev/null | grep -ac "+r.Home+" || true"); got != "0" {
		r.Errorf("the host's folder shows inside %s times", got)
	}
	// The image is shared and must stay as it is.
	r.Sh(a, "echo mine > /usr/bin/mine; rm -f /etc/passwd; echo mine > /workspace/secret; chmod 600 /workspace/secret")
	if _, err := os.Lstat(filepath.Join(r.Base, "usr/bin/mine")); err == nil {
		r.Error("a machine wrote into the image")
	}
	if got := r.Sh(b, "test -s /etc/passwd; ls /usr/bin/mine /workspace/secret 2>/dev/null | wc -l"); got != "0" {
		r.Errorf("a neighbour sees %s of another's files", got)
	}
	if reply := r.Ask(a, "sh", "touch /usr/lib/berth/agent"); reply.Code == 0 {
		if info, err := os.Lstat(filepath.Join(r.Layer, "usr/lib/berth/agent")); err != nil || info.Size() == 0 {
			r.Errorf("a machine changed the agent layer: %v", err)
		}
	}
	if got := r.Sh(a, "hostname; cat /sys/class/net/*/address 2>/dev/null | wc -l; grep -c : /proc/net/dev"); got != "berth\n0\n1" {
		r.Errorf("name and interfaces inside: %q", got)
	}
	_, first := r.pids(a.Handle().Spec.Slot)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", first))
	if err != nil || !strings.Contains(string(status), fmt.Sprintf("\nUid:\t%d\t", base)) {
		r.Errorf("root inside is %.200q outside (%v)", status, err)
	}
}

func lessThan(text string, n int) bool {
	got, err := strconv.Atoi(text)
	return err == nil && got < n
}

// setUID: sudo is a set-uid program, from the image and from what the guest
// installs, and reaches the machine's root only.
func setUID(r *Rig) {
	m := r.Start(r.Spec())
	r.Sh(m, "cp /usr/bin/id /usr/bin/rootid; chmod 4755 /usr/bin/rootid")
	reply, err := Ask(r.Context(), m, "sh", "rootid -u; id -u; stat -c %U:%a /usr/bin/su", 1000)
	if err != nil {
		r.Fatal(err)
	}
	if got := strings.Fields(reply.Text); strings.Join(got, " ") != "0 1000 root:4755" {
		r.Errorf("set-uid programs give %q", reply.Text)
	}
}

// stillFine checks that machines answer, start processes and write files.
func (r *Rig) stillFine(machines ...machine.Machine) {
	r.Helper()
	for _, m := range machines {
		if got := r.Sh(m, "echo fine > /workspace/fine; cat /workspace/fine"); got != "fine" {
			r.Errorf("machine %s: %q", m.ID(), got)
		}
	}
}
