package sessions

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// TestOperationsAtOnce lets several clients do what they like with the same
// sessions, on hosts that fail now and then, while reconciling runs.
func TestOperationsAtOnce(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.use.pace = hasty
	r.use.cfg.OperationDeadline = 500 * time.Millisecond
	seed := rand.Uint64()
	t.Log("seed", seed)
	r.shaky(seed)
	ids := []string{r.create().ID, r.create().ID, r.create().ID}
	r.run()
	var clients sync.WaitGroup
	stop := time.Now().Add(3 * time.Second)
	for i := range 9 {
		clients.Go(func() {
			dice := rand.New(rand.NewPCG(seed, uint64(i)))
			for time.Now().Before(stop) {
				r.anything(ids[i%len(ids)], dice)
			}
		})
	}
	clients.Wait()
	r.setFault(r.host, nil)
	r.setFault(r.second(), nil)
	for _, id := range ids {
		f := &faultRig{rig: r, id: id}
		until(t, "a session is settled", func() bool { return f.standing() == "" })
		if s := r.session(id); s.Status == session.Error {
			t.Errorf("%s: %s", id, s.Error)
		}
	}
	r.use.after.wait(time.Minute)
	r.use.cfg.OperationDeadline = time.Minute
	if _, err := r.use.Release(t.Context(), r.caller, ids[0]); err != nil {
		t.Error(err)
	}
	if _, err := r.use.Resume(t.Context(), r.caller, ids[1]); err != nil {
		t.Error(err)
	}
}

// anything is one thing that a client may do; each may be refused, but never
// fail inside.
func (r *rig) anything(id string, dice *rand.Rand) {
	var err error
	switch n := dice.IntN(10); {
	case n < 3:
		err = r.operate(session.Pause, id, "")
	case n < 5:
		err = r.operate(session.Resume, id, "")
	case n < 8:
		err = r.operate(session.Move, id, []string{"", "h1", "h2"}[dice.IntN(3)])
	default:
		_, err = r.use.Awake(r.t.Context(), r.session(id))
	}
	if code := apierr.From(err).Code; err != nil && code == apierr.Internal && !slices.Contains(shakyAnswers, apierr.From(err).Message) {
		r.t.Errorf("%v", err)
	}
}

const shakyText = "the disk is full"

// shakyAnswers are what a client hears of it, the second from a resume.
var shakyAnswers = []string{shakyText, shakyText + "; the session stays paused"}

// shaky makes both hosts refuse or lose one order in ten.
func (r *rig) shaky(seed uint64) {
	for i, h := range r.world.hosts {
		var mu sync.Mutex
		dice := rand.New(rand.NewPCG(seed, uint64(100+i)))
		r.setFault(h, func(string) *fault {
			mu.Lock()
			defer mu.Unlock()
			switch dice.IntN(20) {
			case 0:
				return &fault{refuse: apierr.New(apierr.Internal, shakyText)}
			case 1:
				return &fault{lost: true}
			}
			return nil
		})
	}
}

// standing is settled without a look at snapshots: those of other sessions are
// among them.
func (f *faultRig) standing() string {
	now := f.session(f.id)
	run, held := f.world.machines(f.id)
	if now.Op != nil || held != 0 || (now.Status == session.Running) != (len(run) == 1) {
		return "not yet"
	}
	return ""
}
