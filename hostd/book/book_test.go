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

func TestBookSurvivesReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "b.db")
	open := func() (*Book, *store.DB) {
		db, err := store.Open(path, store.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return New(db), db
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	b, db := open()
	check(b.PutMachine(machine.Handle{Driver: "oci", Spec: machine.Spec{ID: "m1"}}))
	check(b.PutMachine(machine.Handle{Driver: "oci", Spec: machine.Spec{ID: "m2"}}))
	for _, id := range []string{"s1", "s2", "s3"} {
		check(b.PutSession(hostsession.Record{Acquire: hostlink.Acquire{SessionID: id, Epoch: 3}, MachineID: "m1"}))
	}
	check(b.PutMachine(machine.Handle{Driver: "oci", Spec: machine.Spec{ID: "m3"}}))
	check(b.PutMachine(machine.Handle{Driver: "oci", Spec: machine.Spec{ID: "m4"}}))
	dropped := hostsession.Record{Acquire: hostlink.Acquire{SessionID: "s4", Epoch: 1}, MachineID: "m4"}
	check(b.PutSession(dropped))
	check(b.End(hostlink.Tombstone{SessionID: "s1", Epoch: 3, Reason: session.Released}, "m3"))
	check(b.End(hostlink.Tombstone{SessionID: "s2", Epoch: 3, Error: "It broke."}, ""))
	check(b.DeleteMachine("m2"))
	check(b.Drop(dropped))
	check(b.Ack([]string{"unknown", "s1"}, time.Now()))
	check(db.Close())

	b, db = open()
	defer db.Close()
	machines, err := b.Machines()
	check(err)
	sessions, err := b.Sessions()
	check(err)
	tombs, err := b.Tombstones()
	check(err)
	if len(machines) != 1 || machines[0].Spec.ID != "m1" {
		t.Errorf("machines %+v", machines)
	}
	if len(sessions) != 1 || sessions[0].Acquire.SessionID != "s3" || sessions[0].Acquire.Epoch != 3 {
		t.Errorf("sessions %+v", sessions)
	}
	if len(tombs) != 1 || tombs[0].SessionID != "s2" || tombs[0].Error == "" {
		t.Errorf("tombstones %+v", tombs)
	}
	if tomb, ok, err := b.Tombstone("s1"); err != nil || !ok || tomb.Reason != session.Released {
		t.Errorf("an acknowledged tombstone is %+v, %v, %v", tomb, ok, err)
	}
	check(b.Forget(time.Now().Add(-time.Minute)))
	if _, ok, _ := b.Tombstone("s1"); !ok {
		t.Error("a young tombstone was forgotten")
	}
	check(b.Forget(time.Now().Add(time.Minute)))
	if _, ok, _ := b.Tombstone("s1"); ok {
		t.Error("an old acknowledged tombstone stays")
	}
	if _, ok, _ := b.Tombstone("s2"); !ok {
		t.Error("a tombstone that the record has not taken in was forgotten")
	}
}
