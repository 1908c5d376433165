package microvm_test

import (
	"context"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/machinetest"
)

// TestImpatientCallers: a caller that leaves in the middle of a change leaves a
// machine that is one thing or the other, and that works.
func TestImpatientCallers(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	m := r.Start(r.Spec()).(machine.Kept)
	r.Sh(m, "echo kept > /workspace/note; sync")
	for i := range 12 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*600*time.Microsecond)
		_, errLayer := m.AddLayer(ctx, 0)
		errFreeze := m.Freeze(ctx)
		cancel()
		if m.Frozen() != (errFreeze == nil) {
			t.Fatalf("after %v, %v: frozen %v", errLayer, errFreeze, m.Frozen())
		}
		if err := m.Thaw(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := r.Sh(m, "echo 3 > /proc/sys/vm/drop_caches; cat /workspace/note"); got != "kept" {
			t.Fatalf("the note says %q", got)
		}
	}
	r.Stop(m)
	r.WantNothing()
}
