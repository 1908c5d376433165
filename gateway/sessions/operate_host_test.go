package sessions

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// fault is what goes wrong with one order.
type fault struct {
	refuse error         // answered instead of doing it
	hang   chan struct{} // waits for it before doing anything
	lost   bool          // done, but the answer does not arrive
}

// world is what all fake hosts share: it sees a session that runs twice.
type world struct {
	hosts []*fakeHost

	mu    sync.Mutex // held while machines begin or end to run; taken before a host's own
	twice []string   // guarded by mu
}

func (h *fakeHost) serveOperations(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/sessions/{id}/prepare", order(h, "prepare", h.prepare))
	mux.HandleFunc("POST /v1/sessions/{id}/capture", order(h, "capture", h.capture))
	mux.HandleFunc("POST /v1/sessions/{id}/restore", order(h, "restore", h.restore))
	mux.HandleFunc("POST /v1/sessions/{id}/verdict", order(h, "verdict", h.verdict))
	mux.HandleFunc("DELETE /v1/snapshots/{id}", func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.snapshots, r.PathValue("id"))
		h.deleted = append(h.deleted, r.FormValue("session")+"/"+r.PathValue("id"))
		w.WriteHeader(204)
	})
}

// order takes an order of an operation, with the fault that a test wants.
func order[T any](h *fakeHost, step string, do func(id string, in T) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in T
		_ = json.NewDecoder(r.Body).Decode(&in)
		var hook func(string) *fault
		h.with(func() { hook = h.fault })
		var f fault
		if hook != nil {
			if got := hook(step); got != nil {
				f = *got
			}
		}
		if f.hang != nil {
			select {
			case <-f.hang:
			case <-r.Context().Done():
				return
			}
		}
		out, err := any(nil), f.refuse
		if err == nil {
			out, err = do(r.PathValue("id"), in)
		}
		switch e := apierr.From(err); {
		case f.lost:
			panic(http.ErrAbortHandler)
		case err != nil:
			answer(w, e.Status(), e)
		case out == nil:
			w.WriteHeader(204)
		default:
			answer(w, 200, out)
		}
	}
}

func (h *fakeHost) prepare(_ string, in hostlink.Prepare) (any, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.full || in.OpID == "" || in.Kind == "" || len(in.Key) != 32 {
		return nil, apierr.New(apierr.NoCapacity, "full")
	}
	return nil, nil
}

func (h *fakeHost) capture(id string, in hostlink.Capture) (any, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	st, ok := h.running[id]
	if !ok || st.Epoch != in.Epoch || len(in.Key) != 32 || in.Kind != session.Pause && in.Kind != session.Move {
		return nil, apierr.New(apierr.SessionNotRunning, "no such machine")
	}
	if st.Held != nil && st.Held.OpID != in.OpID {
		return nil, apierr.New(apierr.OperationInProgress, "held for another")
	}
	st.Held, h.gaveTo = &hostlink.Held{OpID: in.OpID, Role: hostlink.Source}, in.To
	h.running[id], h.snapshots[in.SnapshotID] = st, true
	return hostlink.Captured{CaptureMs: 7, Snapshot: session.Snapshot{ID: in.SnapshotID, Host: h.name, Memory: !in.Portable,
		Driver: "fake", CPUClass: "c", Bytes: 100, Durable: in.Durable}}, nil
}

func (h *fakeHost) restore(id string, in hostlink.Restore) (any, error) {
	have := h.fetch(in)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.full {
		return nil, apierr.New(apierr.NoCapacity, "full")
	}
	if !have || len(in.Key) != 32 || in.Kind != session.Resume && in.Kind != session.Move {
		return nil, fmt.Errorf("no snapshot %s, asked at %q", in.Snapshot.ID, in.From)
	}
	if st, ok := h.targets[id]; ok && st.Held.OpID != in.OpID {
		return nil, apierr.New(apierr.OperationInProgress, "held for another")
	}
	st := hostlink.Status{SessionID: id, Epoch: in.Acquire.Epoch, Since: time.Now(), Version: in.Acquire.Version, PassExpires: in.Acquire.PassExpires,
		Held: &hostlink.Held{OpID: in.OpID, Role: hostlink.Target}}
	h.targets[id], h.snapshots[in.Snapshot.ID], h.settings[id] = st, true, in.Acquire.Settings
	return hostlink.Restored{Status: st, Memory: in.Snapshot.Memory, AcquireMs: 3, RestoreMs: 5}, nil
}

// fetch says whether a snapshot can be had: here, at the host named, or from
// the blob store.
func (h *fakeHost) fetch(in hostlink.Restore) bool {
	var here bool
	var world *world
	h.with(func() { here, world = h.snapshots[in.Snapshot.ID], h.world })
	if here || in.Snapshot.Durable || world == nil {
		return here || in.Snapshot.Durable
	}
	for _, other := range world.hosts {
		if "http://"+in.From == other.server.URL {
			other.mu.Lock()
			defer other.mu.Unlock()
			return other.snapshots[in.Snapshot.ID]
		}
	}
	return false
}

func (h *fakeHost) verdict(id string, in hostlink.Verdict) (any, error) {
	var world *world
	h.with(func() { world = h.world })
	if world != nil {
		world.mu.Lock()
		defer world.mu.Unlock()
		defer world.look(id)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	known := false
	if st, ok := h.running[id]; ok && st.Held != nil && st.Held.OpID == in.OpID {
		known = true
		if st.Held = nil; in.Committed {
			delete(h.running, id)
		} else {
			h.running[id] = st
		}
	}
	if st, ok := h.targets[id]; ok && st.Held.OpID == in.OpID {
		known = true
		delete(h.targets, id)
		if st.Held = nil; in.Committed {
			h.running[id] = st
		}
	}
	if !known {
		return nil, apierr.New(apierr.NotFound, "no such operation")
	}
	return nil, nil
}

// look notes a session of which two machines run. It is called with the lock held.
func (w *world) look(id string) {
	var at []string
	for _, h := range w.hosts {
		h.mu.Lock()
		if st, ok := h.running[id]; ok && st.Held == nil {
			at = append(at, h.name)
		}
		h.mu.Unlock()
	}
	if len(at) > 1 {
		w.twice = append(w.twice, fmt.Sprint(id, " runs at ", at))
	}
}

// machines counts a session's machines: those that run and those that are held.
func (w *world) machines(id string) (run []string, held int) {
	for _, h := range w.hosts {
		h.mu.Lock()
		for _, st := range []hostlink.Status{h.running[id], h.targets[id]} {
			switch {
			case st.SessionID == "":
			case st.Held == nil:
				run = append(run, fmt.Sprintf("%s/%d", h.name, st.Epoch))
			default:
				held++
			}
		}
		h.mu.Unlock()
	}
	slices.Sort(run)
	return run, held
}

// kept lists the hosts that keep a session's snapshots, one for each.
func (w *world) kept() (hosts []string) {
	for _, h := range w.hosts {
		h.mu.Lock()
		for range h.snapshots {
			hosts = append(hosts, h.name)
		}
		h.mu.Unlock()
	}
	slices.Sort(hosts)
	return hosts
}

// twoHosts is a rig with hosts h1 and h2 of one CPU class. It looks at them often
// and gives up one that is away soon, but waits with patience for one that works.
func twoHosts(t *testing.T) *rig {
	r := newRig(t)
	w := &world{hosts: []*fakeHost{r.host, newFakeHost(t, "h2")}}
	for _, h := range w.hosts {
		h.with(func() { h.world = w })
		r.hosts.add(h)
		r.hosts.setClass(h.name, "c")
	}
	r.hosts.setPrefer("h1")
	r.world = w
	r.use.pace = brisk
	t.Cleanup(func() {
		r.use.after.wait(time.Minute)
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, what := range w.twice {
			t.Error(what)
		}
	})
	return r
}

var (
	brisk = pace{look: 20 * time.Millisecond, reconcile: 40 * time.Millisecond, host: 150 * time.Millisecond, tell: time.Minute}
	hasty = pace{look: brisk.look, reconcile: brisk.reconcile, host: brisk.host, tell: 300 * time.Millisecond} // hosts hang
)

func (r *rig) second() *fakeHost { return r.hosts.fake("h2") }

func (r *rig) session(id string) session.Session {
	s, _ := r.record.View().Session(id)
	return s
}

func (r *rig) setEvents(h *fakeHost, stream http.HandlerFunc) { h.with(func() { h.events = stream }) }

func (r *rig) setFault(h *fakeHost, f func(step string) *fault) {
	h.with(func() { h.fault = f })
}
