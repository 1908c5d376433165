package link

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"
)

// TestRenew: a stream that was met gets ErrLineage, one whose welcome was still
// on its way must not be taken for a new one, and what comes later works.
func TestRenew(t *testing.T) {
	o := Options{Lineage: [16]byte{1}, Heartbeat: never, Keep: never}
	r := newRig(t, "unix", o)
	gw, ag := r.pair(Options{Heartbeat: never, Keep: never})
	if _, err := ag.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(gw, make([]byte, 1)); err != nil { // the welcome was met
		t.Fatal(err)
	}
	early, unmet := r.pair(Options{Heartbeat: never, Keep: never}) // nothing was read: no welcome
	if _, err := early.Write([]byte("run once")); err != nil {
		t.Fatal(err)
	}
	r.l.Renew([16]byte{2})

	if _, err := gw.Read(make([]byte, 1)); !errors.Is(err, ErrLineage) {
		t.Errorf("a stream of the old lineage: %v", err)
	}
	if _, err := early.Read(make([]byte, 1)); !errors.Is(err, ErrUnknownStream) && !errors.Is(err, ErrLineage) {
		t.Errorf("a stream that was not met: %v", err)
	}
	for _, c := range []*Conn{ag, unmet} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, ErrLineage) {
			t.Errorf("the agent's end: %v", err)
		}
	}
	eventually(t, "the old streams are gone", func() bool { return r.l.Streams() == 0 })

	fresh, err := r.open(context.Background(), Options{Heartbeat: never, Keep: never})
	if err != nil {
		t.Fatal(err)
	}
	nc, err := r.l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	if _, err := nc.Write([]byte("y")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(fresh, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	fresh.mu.Lock()
	defer fresh.mu.Unlock()
	if fresh.lineage != [16]byte{2} || r.l.Addr() != Addr([16]byte{2}) {
		t.Errorf("lineage %v", fresh.lineage)
	}
}
