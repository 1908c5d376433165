package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// fakeWays makes ways that say what a proxyd would be shown.
type fakeWays struct {
	mu  sync.Mutex
	all []*fakeWay // guarded by mu
}

func (f *fakeWays) way(id string, epoch uint64) Way {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := &fakeWay{name: fmt.Sprintf("%s/%d", id, epoch)}
	f.all = append(f.all, w)
	return w
}

// open lists the ways that are open, as session/epoch=pass.
func (f *fakeWays) open() (list []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, w := range f.all {
		w.mu.Lock()
		if w.isOpen {
			list = append(list, w.name+"="+w.pass)
		}
		w.mu.Unlock()
	}
	return list
}

type fakeWay struct {
	name   string
	mu     sync.Mutex
	isOpen bool
	pass   string
}

// shown is the error of a Dial that would have shown that pass.
type shown string

func (s shown) Error() string { return string(s) }

func (w *fakeWay) Dial(context.Context) (net.Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.isOpen {
		return nil, net.ErrClosed
	}
	return nil, shown(w.pass)
}

func (w *fakeWay) Show(pass []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isOpen, w.pass = true, string(pass)
}

func (w *fakeWay) Shut() { w.mu.Lock(); defer w.mu.Unlock(); w.isOpen = false }

// revive gives the next hostd the machines that live.
func (r *rig) revive(_ context.Context, h machine.Handle) (*pool.Guest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.guests {
		if f.id == h.Spec.ID {
			return f.guest(), nil
		}
	}
	return nil, machine.ErrGone
}

// shows is what a new connection of the machine shows, "" for none.
func (f *fakeGuest) shows() string {
	f.mu.Lock()
	dial := f.dial
	f.mu.Unlock()
	var pass shown
	if dial != nil {
		_, err := dial(context.Background())
		errors.As(err, &pass)
	}
	return string(pass)
}

func passed(version uint64, pass string, expires time.Time) hostlink.Settings {
	return hostlink.Settings{Version: version, ExpiresAt: time.Now().Add(time.Hour), Pass: []byte(pass), PassExpires: expires}
}

func TestNewConnectionsShowTheNewestPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 2)
		defer r.close()
		soon, later := time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
		a := order1("s", session.Browser, time.Hour)
		a.Settings = passed(1, "one", soon)
		if st, _, err := r.host.Acquire(t.Context(), a); err != nil || !st.PassExpires.Equal(soon) {
			t.Fatalf("%+v, %v", st, err)
		}
		other := passed(9, "of another epoch", later)
		other.PassEpoch = 2
		mine := passed(3, "three", soon)
		mine.PassEpoch = 1
		for i, step := range []struct {
			set     hostlink.Settings
			want    string
			expires time.Time
		}{
			{passed(1, "one again", later), "one again", later},
			{passed(1, "one, late", soon), "one again", later},
			{passed(1, "one, twice", later), "one again", later},
			{passed(2, "two", soon), "two", soon}, // although it ends sooner
			{passed(1, "one, very late", later.Add(time.Hour)), "two", soon},
			{other, "two", soon},
			{mine, "three", soon},
		} {
			st, err := r.host.Patch(t.Context(), "s", step.set)
			if got := r.guest(0).shows(); err != nil || got != step.want || !st.PassExpires.Equal(step.expires) {
				t.Errorf("step %d: shows %q until %v (%v), want %q until %v", i, got, st.PassExpires, err, step.want, step.expires)
			}
		}
		r.book.mu.Lock()
		r.book.full = true
		r.book.mu.Unlock()
		for _, set := range []hostlink.Settings{passed(3, "in memory only", later), passed(4, "four", later)} {
			if _, err := r.host.Patch(t.Context(), "s", set); err == nil {
				t.Error("what is not in the book is in force")
			}
			if got := r.guest(0).shows(); got != "in memory only" {
				t.Errorf("beside a full disk it shows %q", got)
			}
		}
		r.book.mu.Lock()
		r.book.full = false
		r.book.mu.Unlock()
		r.host.Close() // the next hostd shows what the newest was
		r.host = r.newHost()
		if err := r.host.Adopt(t.Context(), r.revive, nil); err != nil {
			t.Fatal(err)
		}
		if got, open := r.guest(0).shows(), r.ways.open(); got != "three" || open[len(open)-1] != "s/1=three" {
			t.Errorf("after a restart: %q of %q", got, open)
		}
		if _, err := r.host.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, Reason: session.Released}); err != nil {
			t.Fatal(err)
		}
		if got := r.guest(0).shows(); got != "" {
			t.Errorf("after the end it shows %q", got)
		}
	})
}

// A renewal disturbs nothing: the clock of "last client left" goes on, and a
// session whose time is up ends at its time.
func TestARenewalIsNoPatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 2)
		defer r.close()
		began := time.Now()
		r.acquire("s", session.Browser, time.Hour)
		for _, n := range []int{1, 0} {
			r.guest(0).tell(agentlink.Notice{Clients: &n})
			synctest.Wait()
		}
		time.Sleep(session.DisconnectGrace - time.Second)
		set := passed(1, "again", began.Add(time.Hour))
		set.KeepAlive = true // of the version that is here already: it has its word
		if _, err := r.host.Patch(t.Context(), "s", set); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if s := r.host.find("s"); s != nil {
			t.Error("the renewal kept the session alive")
		}
	})
}

// Where a session stands still nothing leaves it, and where it goes on it shows
// what it shall there.
func TestWaysInOperations(t *testing.T) {
	for _, portable := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			all, o := prepare(t, session.Move, "b", true, portable, false)
			defer end(all)
			a, b := all[0], all[1]
			o.holder = a
			if err := errors.Join(o.prepare(), o.capture()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if open := append(a.ways.open(), b.ways.open()...); len(open) != 0 {
				t.Errorf("held: %q are open", open)
			}
			if _, err := a.host.Patch(t.Context(), "s", passed(5, "too early", time.Now())); err != nil {
				t.Error(err)
			}
			if a.host.Record(t.Context(), "s", 1, event.Event{Type: event.Network}) {
				t.Error("an event came into the log of a session that stands still")
			}
			if open := a.ways.open(); len(open) != 0 {
				t.Errorf("a patch while held opened %q", open)
			}
			if err := o.restore(); err != nil {
				t.Fatal(err)
			}
			if open := append(a.ways.open(), b.ways.open()...); len(open) != 0 {
				t.Errorf("restored: %q are open", open)
			}
			set := passed(6, "in time", time.Now().Add(time.Hour))
			set.PassEpoch, set.ShellProxy = 2, true
			if st, err := b.host.Patch(t.Context(), "s", set); err != nil || st.Version != 6 || st.Epoch != 2 {
				t.Errorf("a patch for the target: %+v, %v", st, err)
			}
			if open := b.ways.open(); len(open) != 0 {
				t.Errorf("a patch for the target opened %q", open)
			}
			b.restart() // hostd, before the verdict
			o.committed = true
			o.tell(t, b)
			for _, f := range b.alive() {
				if p, _ := f.heard(); f.started.SessionID == "s" && !p.Shell {
					t.Error("the shell was not told of the proxy")
				}
			}
			o.tell(t, a)
			synctest.Wait()
			if from, to := a.ways.open(), b.ways.open(); len(from) != 0 || len(to) != 1 || to[0] != "s/2=in time" {
				t.Errorf("moved: %q, %q", from, to)
			}
		})
	}
}

// end stops the hosts of a test.
func end(all []*world) {
	for _, w := range all {
		w.end()
	}
}

// heard is what the agent knows, and how often it was told.
func (f *fakeGuest) heard() (agentlink.Proxy, int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.proxy, f.told
}

func TestTheShellIsToldOfTheProxy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 2)
		defer r.close()
		a := order1("s", session.Shell, time.Hour)
		a.ShellProxy = true
		if _, _, err := r.host.Acquire(t.Context(), a); err != nil {
			t.Fatal(err)
		}
		expect := func(when string, shell bool, version uint64, times int) {
			t.Helper()
			if p, told := r.guest(0).heard(); p.Shell != shell || p.Version != version || told != times {
				t.Errorf("%s: it knows %+v, told %d times; want %v of version %d, %d times", when, p, told, shell, version, times)
			}
		}
		expect("at the start", true, 1, 0)
		patch := func(version uint64, shell bool) {
			t.Helper()
			if _, err := r.host.Patch(t.Context(), "s", hostlink.Settings{Version: version, ExpiresAt: a.ExpiresAt, ShellProxy: shell}); err != nil {
				t.Fatal(err)
			}
		}
		patch(2, true)
		expect("after a patch of something else", true, 1, 0)
		patch(3, false)
		expect("after a patch", false, 3, 1)

		r.guest(0).set(func(f *fakeGuest) { f.deaf = true })
		began := time.Now()
		patch(4, true)
		if took := time.Since(began); took != tellWait {
			t.Errorf("a patch waited %s for an agent that does not obey", took)
		}
		time.Sleep(tellTime)
		began = time.Now()
		renewal := hostlink.Settings{Version: 4, ExpiresAt: a.ExpiresAt, ShellProxy: true, Pass: []byte("again"), PassExpires: began.Add(time.Hour)}
		if st, err := r.host.Patch(t.Context(), "s", renewal); err != nil || !st.PassExpires.Equal(renewal.PassExpires) {
			t.Fatalf("%+v, %v", st, err)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("a renewal waited %s for an agent that does not obey", took)
		}
		r.guest(0).set(func(f *fakeGuest) { f.deaf = false })
		time.Sleep(tellSeldom)
		if p, _ := r.guest(0).heard(); !p.Shell || p.Version != 4 {
			t.Errorf("an agent that obeys again knows %+v", p)
		}

		r.host.Close()
		r.host = r.newHost()
		_, before := r.guest(0).heard()
		if err := r.host.Adopt(t.Context(), r.revive, nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		expect("after a restart", true, 4, before+1)
	})
}

// What was patched while a session stood still is in force before anything in
// it runs.
func TestTheShellIsToldAtTheThaw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Pause, "", true, false, false)
		defer end(all)
		w := all[0]
		if err := o.capture(); err != nil {
			t.Fatal(err)
		}
		set := hostlink.Settings{Version: 7, ExpiresAt: time.Now().Add(time.Hour), ShellProxy: true}
		if _, err := w.host.Patch(t.Context(), "s", set); err != nil {
			t.Fatal(err)
		}
		o.tell(t, w) // aborted
		for _, f := range w.alive() {
			if p, told := f.heard(); f.started.SessionID == "s" && (!p.Shell || p.Version != 7 || told != 0) {
				t.Errorf("it knows %+v, told %d times beside the thaw", p, told)
			}
		}
	})
}

func TestRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 2)
		defer r.close()
		st := r.acquire("s", session.Browser, time.Hour)
		e := event.Event{Type: event.Network, Text: "refused", At: st.Since.Add(-time.Hour)}
		for i, c := range []struct {
			id    string
			epoch uint64
			want  bool
		}{{"s", 1, true}, {"s", 2, false}, {"s", 0, false}, {"other", 1, false}} {
			if got := r.host.Record(t.Context(), c.id, c.epoch, e); got != c.want {
				t.Errorf("case %d: %v", i, got)
			}
		}
		if last, n, _ := r.events.last("s"); n != 2 || last.Text != "refused" || last.At.Before(st.Since) {
			t.Errorf("%d events, the last %+v", n, last)
		}
	})
}
