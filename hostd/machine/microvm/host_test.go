package microvm_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/machinetest"
	"github.com/berth-dev/berth/hostd/machine/microvm"
)

// pidOf finds the process that runs as the slot's user.
func pidOf(t *testing.T, m machine.Machine) int {
	t.Helper()
	uid := fmt.Sprintf("\nUid:\t%d\t", m.Handle().Spec.Slot.UIDBase)
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is good
	for _, dir := range dirs {
		if status, err := os.ReadFile(filepath.Join(dir, "status")); err == nil && strings.Contains(string(status), uid) {
			pid, _ := strconv.Atoi(filepath.Base(dir)) // digits by the pattern
			return pid
		}
	}
	t.Fatal("no process of the machine's user")
	return 0
}

// TestConfinement: what a QEMU that its guest has taken over could reach.
func TestConfinement(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	m := r.Start(r.Spec())
	proc := fmt.Sprintf("/proc/%d/", pidOf(t, m))
	status, err := os.ReadFile(proc + "status")
	if err != nil {
		t.Fatal(err)
	}
	uid := m.Handle().Spec.Slot.UIDBase
	for _, want := range []string{
		fmt.Sprintf("Uid:\t%d\t%d\t%d\t%d", uid, uid, uid, uid), fmt.Sprintf("Gid:\t%d\t%d\t%d\t%d", uid, uid, uid, uid),
		"Groups:\t \n", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapAmb:\t0000000000000000",
		"NoNewPrivs:\t1", "Seccomp:\t2",
	} {
		if !strings.Contains(string(status), want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	for _, ns := range []string{"mnt", "pid", "ipc", "uts", "net"} {
		own, err1 := os.Readlink("/proc/self/ns/" + ns)
		its, err2 := os.Readlink(proc + "ns/" + ns)
		if err1 != nil || err2 != nil || own == its {
			t.Errorf("%s namespace %s, the host's is %s (%v, %v)", ns, its, own, err1, err2)
		}
	}
	names, err := os.ReadDir(proc + "root")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range names {
		if !strings.Contains(" dev lib lib64 proc usr ", " "+e.Name()+" ") {
			t.Errorf("it sees /%s", e.Name())
		}
	}
	mounts, err := os.ReadFile(proc + "mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); f[4] != "/proc" && !strings.HasPrefix(f[4], "/dev/") && !strings.HasPrefix(f[5], "ro,") {
			t.Errorf("it may write to %s: %s", f[4], f[5])
		}
	}
	wantOwnFiles(t, r, proc, m.ID())
	if env, err := os.ReadFile(proc + "environ"); err != nil || len(env) != 0 {
		t.Errorf("environment %q, %v", env, err)
	}
}

// wantOwnFiles looks at all that the process has open.
func wantOwnFiles(t *testing.T, r *machinetest.Rig, proc, id string) {
	t.Helper()
	fds, err := os.ReadDir(proc + "fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fds {
		to, err := os.Readlink(proc + "fd/" + e.Name())
		if err != nil {
			continue // closed meanwhile
		}
		info, err := os.ReadFile(proc + "fdinfo/" + e.Name())
		if err != nil {
			continue
		}
		// flags are octal; the last digit's lower bits are the access mode (open(2)).
		_, flags, _ := strings.Cut(string(info), "flags:\t")
		line, _, _ := strings.Cut(flags, "\n")
		mode, _ := strconv.ParseUint(line, 8, 64)
		own := strings.HasPrefix(to, filepath.Join(r.Home, id)+"/")
		if strings.HasPrefix(to, "/") && !own && to != "/dev/net/tun" && !strings.HasPrefix(to, "/memfd:") && mode&syscall.O_ACCMODE != syscall.O_RDONLY {
			t.Errorf("descriptor %s may write to %s", e.Name(), to)
		}
	}
}

// TestTemplateMemoryIsSealed: nobody who has it can alter or cut it.
func TestTemplateMemoryIsSealed(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	m := r.Start(r.Spec())
	found := 0
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pidOf(t, m))) // the pattern is good
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err != nil || !strings.HasPrefix(to, "/memfd:berth-template") {
			continue
		}
		found++
		f, err := os.OpenFile(fd, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte("x"), 0); err == nil {
			t.Error("wrote into the template's memory")
		}
		if err := f.Truncate(0); err == nil {
			t.Error("cut the template's memory")
		}
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096); err == nil {
			t.Error("punched a hole into the template's memory")
		}
		if data, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			t.Error("mapped the template's memory for writing")
			_ = unix.Munmap(data)
		}
		f.Close()
	}
	if found == 0 {
		t.Error("the machine has no template's memory")
	}
}

// TestKilledQEMU: Done follows within a second, running or frozen.
func TestKilledQEMU(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	for _, frozen := range []bool{false, true} {
		m := r.Start(r.Spec()).(machine.Kept)
		if frozen {
			if err := m.Freeze(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := syscall.Kill(pidOf(t, m), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		select {
		case <-m.Done():
		case <-time.After(time.Second):
			t.Error("not seen within a second")
		}
		if _, err := m.Dial(t.Context()); err == nil {
			t.Error("dialled the dead")
		}
		if err := m.Freeze(t.Context()); err == nil && !frozen {
			t.Error("froze the dead")
		}
		r.Stop(m)
		r.WantNothing()
	}
}

// TestTwoHomes: hostds side by side touch neither machines nor templates of
// each other's.
func TestTwoHomes(t *testing.T) {
	a, b := machinetest.NewRig(t, subject), machinetest.NewRig(t, subject)
	m, other := a.Start(a.Spec()), b.Start(b.Spec())
	b.Stop(other)
	if err := b.Driver.Sweep(t.Context(), func(string) bool { return false }); err != nil {
		t.Error(err)
	}
	if got := a.Ask(m, "echo", "alive"); got.Text != "alive" {
		t.Errorf("echo gave %q", got.Text)
	}
	second := a.Start(a.Spec()) // its template is still loaded
	a.Stop(m)
	a.Stop(second)
}

// TestHolderOutlivesHostd: the next hostd finds the template's memory; the
// sweep ends it when no machine is left.
func TestHolderOutlivesHostd(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	m := r.Start(r.Spec())
	before := holders(t, r)
	handle := m.Handle()
	r.Restart()
	if err := r.Driver.Sweep(t.Context(), func(id string) bool { return id == m.ID() }); err != nil {
		t.Fatal(err)
	}
	adopted, err := r.Driver.Adopt(t.Context(), handle)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	r.Stop(r.Start(r.Spec()))
	t.Logf("a start with the found template and its end took %v", time.Since(begin))
	if after := holders(t, r); after != before {
		t.Errorf("holders were %s, are %s", before, after)
	}
	r.Stop(adopted)
	if err := r.Driver.Sweep(t.Context(), func(string) bool { return false }); err != nil {
		t.Error(err)
	}
	if before == "" || holders(t, r) != "" {
		t.Errorf("holder %q, and after the sweep %q", before, holders(t, r))
	}
}

// TestAdoptUnderAnotherQEMU: a QEMU that was replaced ends no machine of the one
// before. Captures of those would fit nothing, so there are none.
func TestAdoptUnderAnotherQEMU(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	m := r.Start(r.Spec())
	handle, template := m.Handle(), m.(machine.Kept).TemplateHash()
	r.Restart()
	d := r.Driver.(*microvm.Driver)
	class := d.CPUClass()
	d.SetClass("another")
	defer d.SetClass(class)
	adopted, err := d.Adopt(t.Context(), handle)
	if err != nil {
		t.Fatal(err)
	}
	k := adopted.(machine.Kept)
	if err := k.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c, err := k.Capture(t.Context()); err == nil {
		t.Errorf("a capture of class %q", c.CPUClass())
	}
	if err := k.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	conn, err := adopted.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	spec := r.Spec()
	spec.Template = template
	if _, err := d.Template(t.Context(), spec); err == nil {
		t.Error("a template of another class is taken for a new machine")
	}
	r.Stop(adopted)
}

// holders lists the processes that hold templates for the rig's Home, by which
// its cgroups are named.
func holders(t *testing.T, r *machinetest.Rig) string {
	t.Helper()
	sum := sha256.Sum256([]byte(r.Home))
	group := "/berth/" + hex.EncodeToString(sum[:4]) + "/"
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is good
	for _, path := range dirs {
		if data, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(data), "berth-template\x00infinity") {
			if in, err := os.ReadFile(filepath.Join(filepath.Dir(path), "cgroup")); err != nil || !strings.Contains(string(in), group) {
				continue
			}
			found = append(found, filepath.Base(filepath.Dir(path)))
		}
	}
	return strings.Join(found, " ")
}

// TestDamagedTemplate: a template whose files are not what its name says is
// refused, whichever file it is.
func TestDamagedTemplate(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	spec := r.Spec()
	hash, err := r.Driver.(machine.Keeper).Template(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ram", "device", "top.qcow2", "base", "meta.json", "missing"} {
		home := t.TempDir()
		cache := filepath.Join(home, "cache")
		d, letGo := newDriver(t, filepath.Join(home, "machines"), cache, r.Base, r.Layer)
		stream, err := r.Driver.(machine.Keeper).OpenTemplate(hash)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.(machine.Keeper).AddTemplate(t.Context(), hash, stream); err != nil {
			t.Fatal(err)
		}
		stream.Close()
		damage(t, filepath.Join(cache, hash), name)
		again := r.SpecIn(spec.Slot)
		again.Template = hash
		if m, err := d.Start(t.Context(), again, machinetest.Ignore); err == nil {
			t.Errorf("%s: started from a damaged template", name)
			r.Stop(m)
		} else {
			t.Logf("%s: %v", name, err)
		}
		if err := d.Sweep(context.Background(), func(string) bool { return false }); err != nil {
			t.Error(err)
		}
		letGo()
		r.WantNothing()
	}
}

func damage(t *testing.T, dir, name string) {
	t.Helper()
	if name == "missing" {
		if err := os.Remove(filepath.Join(dir, "ram")); err != nil {
			t.Fatal(err)
		}
		return
	}
	path := filepath.Join(dir, name)
	if name == "base" { // a second name of the image that others use
		info, err := os.Stat(path)
		if err == nil {
			err = errors.Join(os.Remove(path), os.WriteFile(path, make([]byte, 100), 0o600), os.Truncate(path, info.Size()))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, 20); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b, 20); err != nil {
		t.Fatal(err)
	}
}

// TestAgentThatNeverComesUp: no template, no machine, a reason.
func TestAgentThatNeverComesUp(t *testing.T) {
	r := machinetest.NewRig(t, machinetest.Subject{BaseEnv: subject.BaseEnv, OwnKernel: true, Slot: makeTap,
		New: func(t testing.TB, home, base, _ string) (machine.Driver, func()) {
			layer := t.TempDir()
			agent := filepath.Join(layer, "usr/lib/berth/agent")
			if err := os.MkdirAll(filepath.Dir(agent), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(agent, []byte("#!/bin/false\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			return newDriver(t, home, filepath.Join(t.TempDir(), "cache"), base, layer)
		}})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m, err := r.Driver.Start(ctx, r.Spec(), machinetest.Ignore)
	if err == nil {
		r.Stop(m)
	}
	if text := fmt.Sprint(err); !strings.Contains(text, "kernel ended") || !strings.Contains(text, "Kernel panic") {
		t.Errorf("got %v", err)
	}
	r.WantNothing()
}

func TestNewWantsAll(t *testing.T) {
	for want, cfg := range map[string]microvm.Config{
		"Boot":  {Home: t.TempDir(), Cache: t.TempDir()},
		"Ready": {Home: t.TempDir(), Cache: t.TempDir(), Boot: "/x", AgentLayer: "/x"},
		"qemu":  {Home: t.TempDir(), Cache: t.TempDir(), Boot: "/x", AgentLayer: "/x", Ready: ready, QEMU: "no-such-qemu"},
		"accel": {Home: t.TempDir(), Cache: t.TempDir(), Boot: "/x", AgentLayer: "/x", Ready: ready, Accel: "warp"},
	} {
		if _, err := microvm.New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}
