// Package machinetest is the suite that every machine driver must pass. A
// driver's test calls Run; the suite boots real machines on the real guest
// image with a small agent of its own (guest/) and looks at them from inside
// and from the host.
//
// It needs root and what machines are made of, for most drivers the image named
// by BERTH_IMAGE_BASE: without them it skips by name on a laptop and fails where
// CI=true.
package machinetest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/session"
)

// ImageEnv names the variable with the guest image's root folder, which is what
// most drivers make machines of.
const ImageEnv = "BERTH_IMAGE_BASE"

// Subject makes drivers to test.
type Subject struct {
	// New gives a driver on a home folder, an image base and an agent layer,
	// and the function that lets go of its machines without ending them, as a
	// hostd that dies does.
	New func(t testing.TB, home, base, layer string) (d machine.Driver, letGo func())
	// BaseEnv names the variable with the folder that New gets as base; default
	// ImageEnv.
	BaseEnv string
	// OwnKernel: machines have a kernel of their own.
	OwnKernel bool
	// Slot prepares a slot's empty network namespace, given by its name; may be
	// nil.
	Slot func(t testing.TB, netns string)
	// Sibling is New for another host: it shares nothing with the first, so that
	// what it builds is built independently. Not nil says that the driver is a
	// machine.Keeper.
	Sibling func(t testing.TB, home, base, layer string) (d machine.Driver, letGo func())
}

func (s Subject) baseEnv() string {
	if s.BaseEnv == "" {
		return ImageEnv
	}
	return s.BaseEnv
}

// Rig is what one test needs: a home, the layers and one driver on them.
type Rig struct {
	testing.TB
	Home, Base, Layer string
	Driver            machine.Driver
	subject           Subject
	letGo             func()
	ids               []string
	slots             []machine.Slot
}

// waitFor bounds every wait of the suite.
const waitFor = 20 * time.Second

// NewRig makes a rig whose end checks that nothing of its machines is left.
func NewRig(t testing.TB, s Subject) *Rig {
	t.Helper()
	base := os.Getenv(s.baseEnv())
	if base == "" || os.Geteuid() != 0 {
		missing := fmt.Sprintf("machinetest needs root and %s (made by scripts/image)", s.baseEnv())
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	r := &Rig{TB: t, Home: filepath.Join(t.TempDir(), "machines"), Base: base, Layer: guestLayer(t), subject: s}
	r.Driver, r.letGo = s.New(t, r.Home, r.Base, r.Layer)
	t.Cleanup(r.end)
	return r
}

// end stops what the test left running and fails it for anything that stays.
func (r *Rig) end() {
	ctx, cancel := context.WithTimeout(context.Background(), waitFor)
	defer cancel()
	if err := r.Driver.Sweep(ctx, func(string) bool { return false }); err != nil {
		r.Errorf("sweep at the end: %v", err)
	}
	r.letGo()
	r.WantNothing()
	for _, s := range r.slots {
		if out, err := exec.Command("ip", "netns", "delete", s.Name).CombinedOutput(); err != nil {
			r.Errorf("delete namespace: %v: %s", err, out)
		}
	}
}

// Restart replaces the driver by a new one on the same home.
func (r *Rig) Restart() {
	r.letGo()
	r.Driver, r.letGo = r.subject.New(r, r.Home, r.Base, r.Layer)
}

var (
	slotNumber atomic.Int32
	idNumber   atomic.Int64
)

// firstUID is high above the ranges of a hostd that runs beside the tests.
const firstUID = 1_000_000_000

// Spec gives a small machine in a fresh slot with no way out.
func (r *Rig) Spec() machine.Spec {
	r.Helper()
	n := int(slotNumber.Add(1)) + os.Getpid()%10_000*64 // packages are tested at the same time
	s := machine.Slot{Index: n, Name: fmt.Sprintf("berth-mt-%d", n), UIDBase: firstUID + uint32(n%16_000)*65536}
	s.NetNS = "/run/netns/" + s.Name
	if out, err := exec.Command("ip", "netns", "add", s.Name).CombinedOutput(); err != nil {
		r.Fatalf("make a namespace: %v: %s", err, out)
	}
	r.slots = append(r.slots, s)
	if r.subject.Slot != nil {
		r.subject.Slot(r, s.Name)
	}
	return r.SpecIn(s)
}

// SpecIn gives a small machine in a slot of this rig that is free.
func (r *Rig) SpecIn(s machine.Slot) machine.Spec {
	id := fmt.Sprintf("%012x%04x%08x", time.Now().UnixMicro(), os.Getpid()&0xffff, idNumber.Add(1))
	r.ids = append(r.ids, id)
	return machine.Spec{ID: id, Kind: session.Shell, Size: session.Size{VCPU: 1, GiB: 1},
		DiskBytes: 256 << 20, Pids: 256, Slot: s}
}

// Ignore is a persist callback that keeps nothing.
func Ignore(machine.Handle) error { return nil }

// Start boots a machine or fails the test.
func (r *Rig) Start(spec machine.Spec) machine.Machine {
	r.Helper()
	m, err := r.Driver.Start(r.Context(), spec, Ignore)
	if err != nil {
		r.Fatalf("start: %v", err)
	}
	return m
}

// Stop ends a machine or fails the test.
func (r *Rig) Stop(m machine.Machine) {
	r.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), waitFor)
	defer cancel()
	if err := m.Stop(ctx); err != nil {
		r.Errorf("stop: %v", err)
	}
}

// Reply is the guest's answer: Text is output, Code an exit code or errno.
type Reply struct {
	Text string `json:"text"`
	Code int    `json:"code"`
}

// Ask sends one request to the machine's agent.
func Ask(ctx context.Context, m machine.Machine, do, text string, uid int) (Reply, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*waitFor)
	defer cancel()
	conn, err := m.Dial(ctx)
	if err != nil {
		return Reply{}, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := json.NewEncoder(conn).Encode(map[string]any{"do": do, "text": text, "uid": uid}); err != nil {
		return Reply{}, err
	}
	var reply Reply
	if err := json.NewDecoder(bufio.NewReader(conn)).Decode(&reply); err != nil {
		return Reply{}, fmt.Errorf("answer to %s: %w", do, err)
	}
	return reply, nil
}

// Ask asks m or fails the test.
func (r *Rig) Ask(m machine.Machine, do, text string) Reply {
	r.Helper()
	reply, err := Ask(r.Context(), m, do, text, 0)
	if err != nil {
		r.Fatalf("ask %s: %v", do, err)
	}
	return reply
}

// Sh runs a script as root inside and gives its output, which must be had
// with exit code 0.
func (r *Rig) Sh(m machine.Machine, script string) string {
	r.Helper()
	reply := r.Ask(m, "sh", script)
	if reply.Code != 0 {
		r.Fatalf("%s\nended with %d: %s", script, reply.Code, reply.Text)
	}
	return strings.TrimSpace(reply.Text)
}

// WantDone fails the test unless m is seen to end.
func (r *Rig) WantDone(m machine.Machine) {
	r.Helper()
	select {
	case <-m.Done():
	case <-time.After(waitFor):
		r.Fatal("the machine did not end")
	}
}

// Until polls a condition.
func (r *Rig) Until(what string, ok func() bool) {
	r.Helper()
	for deadline := time.Now().Add(waitFor); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.Fatalf("waited in vain: %s", what)
		}
	}
}
