package machinetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
)

func lifecycle(r *Rig) {
	if err := r.Driver.Check(r.Context()); err != nil {
		r.Fatalf("check: %v", err)
	}
	if r.Driver.Name() == "" || !strings.Contains(r.Driver.Isolation(), " ") {
		r.Error("the driver has no name or says nothing of its isolation")
	}
	spec := r.Spec()
	var kept machine.Handle
	m, err := r.Driver.Start(r.Context(), spec, func(h machine.Handle) error {
		if left := r.leftovers(); len(left) != 0 {
			r.Errorf("acquired before persist: %v", left)
		}
		kept = h
		return nil
	})
	if err != nil {
		r.Fatal(err)
	}
	if !reflect.DeepEqual(kept, m.Handle()) || !reflect.DeepEqual(kept.Spec, spec) || m.ID() != spec.ID {
		r.Errorf("handles differ: kept %+v, has %+v", kept, m.Handle())
	}
	if got := r.Ask(m, "echo", "hello"); got.Text != "hello" {
		r.Errorf("echo gave %q", got.Text)
	}
	if err := m.Promote(r.Context()); err != nil {
		r.Error(err)
	}
	select {
	case <-m.Done():
		r.Error("done while it runs")
	default:
	}
	r.Stop(m)
	r.WantDone(m)
	r.WantNothing()
	r.Stop(m)
	if conn, err := m.Dial(r.Context()); err == nil {
		conn.Close()
		r.Error("dialled a machine that is gone")
	}
}

// startsAtOnce boots 20 machines side by side: all work, none shares an
// identity, all go.
func startsAtOnce(r *Rig) {
	const n = 20
	var specs [n]machine.Spec
	for i := range specs {
		specs[i] = r.Spec()
	}
	var wg sync.WaitGroup
	var ids [n]string
	var errs [n]error
	for i := range specs {
		wg.Go(func() { ids[i], errs[i] = r.startAskStop(specs[i]) })
	}
	wg.Wait()
	seen := map[string]bool{}
	for i, err := range errs {
		if err != nil {
			r.Errorf("machine %d: %v", i, err)
		} else if id := ids[i]; !r.cloned() && (len(id) != 32 || seen[id]) {
			r.Errorf("machine id %q is malformed or not unique", id)
		}
		seen[ids[i]] = true
	}
	r.WantNothing()
}

// cloned says whether machines begin as clones of one memory: then it is their
// agent that makes them different, when it is told to.
func (r *Rig) cloned() bool {
	_, ok := r.Driver.(machine.Keeper)
	return ok
}

// startAskStop gives a machine's machine-id.
func (r *Rig) startAskStop(spec machine.Spec) (string, error) {
	m, err := r.Driver.Start(r.Context(), spec, Ignore)
	if err != nil {
		return "", err
	}
	reply, err := Ask(r.Context(), m, "sh", "cat /etc/machine-id", 0)
	ctx, cancel := context.WithTimeout(context.Background(), waitFor)
	defer cancel()
	return strings.TrimSpace(reply.Text), errors.Join(err, m.Stop(ctx))
}

// sequence starts and ends machines in one slot, 300 of them where
// BERTH_SOAK is set, and leaves nothing.
func sequence(r *Rig) {
	slot, n := r.Spec().Slot, 15
	if os.Getenv("BERTH_SOAK") != "" {
		n = 300
	}
	begin := time.Now()
	for range n {
		if _, err := r.startAskStop(r.SpecIn(slot)); err != nil {
			r.Fatal(err)
		}
	}
	r.Logf("%d machines, %v each", n, time.Since(begin)/time.Duration(n))
	r.WantNothing()
}

// failedStarts fails in each way a spec or the caller can, and checks that
// nothing stays.
func failedStarts(r *Rig) {
	good := r.Spec()
	refused := errors.New("disk full")
	if _, err := r.Driver.Start(r.Context(), good, func(machine.Handle) error { return refused }); !errors.Is(err, refused) {
		r.Errorf("a failed persist gave %v", err)
	}
	r.WantNothing()
	for name, spoil := range map[string]func(*machine.Spec){
		"id":      func(s *machine.Spec) { s.ID = "../" + s.ID },
		"no id":   func(s *machine.Spec) { s.ID = "" },
		"disk":    func(s *machine.Spec) { s.DiskBytes = 1 },
		"pids":    func(s *machine.Spec) { s.Pids = 0 },
		"size":    func(s *machine.Spec) { s.Size.GiB = 0 },
		"uids":    func(s *machine.Spec) { s.Slot.UIDBase = 0 },
		"netns":   func(s *machine.Spec) { s.Slot.NetNS += "-missing" },
		"not abs": func(s *machine.Spec) { s.Slot.NetNS = "x" },
	} {
		spec := r.SpecIn(good.Slot)
		spoil(&spec)
		if m, err := r.Driver.Start(r.Context(), spec, Ignore); err == nil {
			r.Errorf("%s: a bad spec started", name)
			r.Stop(m)
		}
		r.WantNothing()
	}
	// An id in use: the machine that has it must not suffer.
	m := r.Start(good)
	if _, err := r.Driver.Start(r.Context(), good, Ignore); err == nil {
		r.Error("two machines of one id")
	}
	if got := r.Ask(m, "echo", "still here"); got.Text != "still here" {
		r.Errorf("echo gave %q", got.Text)
	}
	r.Stop(m)
}

func missingImage(r *Rig) {
	spec := r.Spec()
	for name, dirs := range map[string][2]string{
		"image": {filepath.Join(r.Base, "missing"), r.Layer},
		"layer": {r.Base, filepath.Join(r.Layer, "missing")},
		"agent": {r.Base, r.TempDir()},
	} {
		d, letGo := r.subject.New(r, r.Home, dirs[0], dirs[1])
		if err := d.Check(r.Context()); err == nil {
			r.Errorf("%s: check found nothing missing", name)
		}
		spec := r.SpecIn(spec.Slot)
		if m, err := d.Start(r.Context(), spec, Ignore); err == nil {
			r.Errorf("%s: started without", name)
			r.Stop(m)
		}
		letGo()
		r.WantNothing()
	}
}

// canceledStarts cancels starts at moments all over their course.
func canceledStarts(r *Rig) {
	slot := r.Spec().Slot
	for after := time.Duration(0); after < 150*time.Millisecond; after += 12 * time.Millisecond {
		ctx, cancel := context.WithTimeout(r.Context(), after)
		m, err := r.Driver.Start(ctx, r.SpecIn(slot), Ignore)
		cancel()
		if err == nil {
			r.Stop(m)
		} else if !errors.Is(err, context.DeadlineExceeded) {
			r.Errorf("canceled after %v: %v", after, err)
		}
		r.WantNothing()
	}
}

// A host that crashes is a process of the test binary that is killed while it
// starts a machine.
const crashEnv = "MACHINETEST_CRASH"

// crash is what the killed process is told.
type crash struct {
	Home, Base, Layer string
	Spec              machine.Spec
}

func (c crash) env() string {
	data, err := json.Marshal(c)
	if err != nil {
		panic(fmt.Sprintf("marshal %+v: %v", c, err)) // plain fields: cannot fail
	}
	return crashEnv + "=" + string(data)
}
