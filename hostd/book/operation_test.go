package book

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	hostsession "github.com/berth-dev/berth/hostd/session"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/store"
)

func open(t *testing.T) *Book {
	db, err := store.Open(filepath.Join(t.TempDir(), "b.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return New(db)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// part is a session's record in an operation, with its machine.
func part(t *testing.T, b *Book, role hostlink.Role, epoch uint64) hostsession.Record {
	t.Helper()
	r := hostsession.Record{Acquire: hostlink.Acquire{SessionID: "s", Epoch: epoch}, MachineID: string(role),
		Op: &hostsession.Op{ID: "op", Kind: session.Move, Role: role, SnapshotID: "snap"}}
	put := b.PutSession
	if role == hostlink.Target {
		put = b.PutTarget
	}
	must(t, put(r))
	must(t, b.PutMachine(machine.Handle{Spec: machine.Spec{ID: r.MachineID}}))
	return r
}

// state is what the book has: machines, sessions, targets.
func state(t *testing.T, b *Book) (n [3]int) {
	t.Helper()
	machines, err := b.Machines()
	must(t, err)
	sessions, err := b.Sessions()
	must(t, err)
	targets, err := b.Targets()
	must(t, err)
	return [3]int{len(machines), len(sessions), len(targets)}
}

func TestBothPartsOfAMoveOnOneHost(t *testing.T) {
	committed, aborted := hostlink.Verdict{OpID: "op", Committed: true}, hostlink.Verdict{OpID: "op"}
	for name, c := range map[string]struct {
		v     hostlink.Verdict
		left  bool
		do    func(b *Book, source, target hostsession.Record)
		lasts string
	}{
		"committed": {committed, false, func(b *Book, source, target hostsession.Record) {
			must(t, b.Discard(source, &committed, &hostsession.Left{SessionID: "s", Epoch: 1}))
			must(t, b.GoOn(target, committed))
		}, "target"},
		"aborted": {aborted, false, func(b *Book, source, target hostsession.Record) {
			must(t, b.GoOn(source, aborted))
			must(t, b.Discard(target, &aborted, nil))
		}, "source"},
		"left": {committed, true, func(b *Book, source, target hostsession.Record) {
			must(t, b.Discard(target, nil, nil))
			must(t, b.Discard(source, &committed, &hostsession.Left{SessionID: "s", Epoch: 1, SnapshotID: "snap", At: time.Now()}))
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t)
			source, target := part(t, b, hostlink.Source, 1), part(t, b, hostlink.Target, 2)
			if n := state(t, b); n != [3]int{2, 1, 1} {
				t.Fatalf("at first %v", n)
			}
			c.do(b, source, target)
			want := [3]int{1, 1, 0}
			if c.lasts == "" {
				want = [3]int{}
			}
			if n := state(t, b); n != want {
				t.Errorf("in the end %v, want %v", n, want)
			}
			if all, _ := b.Sessions(); c.lasts != "" && all[0].MachineID != c.lasts {
				t.Errorf("machine %s lasts", all[0].MachineID)
			}
			if l, ok, err := b.Left("s"); err != nil || ok != c.left || ok && (l.Epoch != 1 || l.SnapshotID != "snap") {
				t.Errorf("left %v %+v %v", ok, l, err)
			}
			if v, ok, err := b.Verdict("op"); err != nil || !ok || v != c.v {
				t.Errorf("verdict %v %+v %v", ok, v, err)
			}
		})
	}
}

func TestWhatLeftIsForgottenAfterThePauseThatItMayBe(t *testing.T) {
	b := open(t)
	r := part(t, b, hostlink.Source, 1)
	v := hostlink.Verdict{OpID: "op", Committed: true}
	must(t, b.Discard(r, &v, &hostsession.Left{SessionID: "s", Epoch: 1, At: time.Now()}))
	must(t, b.Forget(time.Now().Add(session.PausedMax-time.Hour)))
	if _, ok, _ := b.Left("s"); !ok {
		t.Error("a session that may still be paused was forgotten")
	}
	if _, ok, _ := b.Verdict("op"); ok {
		t.Error("an old verdict stays")
	}
	must(t, b.Forget(time.Now().Add(session.PausedMax+time.Hour)))
	if _, ok, _ := b.Left("s"); ok {
		t.Error("what left long ago stays")
	}
}

func TestAnEndRemovesTheMarkOfAPause(t *testing.T) {
	b := open(t)
	r := part(t, b, hostlink.Source, 1)
	must(t, b.Discard(r, nil, &hostsession.Left{SessionID: "s", Epoch: 1, At: time.Now()}))
	must(t, b.End(hostlink.Tombstone{SessionID: "s", Epoch: 1, Reason: session.Released}, ""))
	if _, ok, _ := b.Left("s"); ok {
		t.Error("an ended session is still marked as paused")
	}
}
