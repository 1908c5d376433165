package placement

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// leadership says in which term this gateway leads with a record that holds
// everything committed before it.
type leadership struct {
	mu      sync.Mutex
	term    uint64        // 0: does not lead, or does not know all yet; guarded by mu
	changed chan struct{} // closed at each change of term, nil until asked for; guarded by mu
}

func (l *leadership) set(term uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.term == term {
		return
	}
	l.term = term
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

func (l *leadership) get() (term uint64, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.term, l.changed
}

// Leader says whether this gateway leads and its record holds all that was
// committed before.
func (r *Record) Leader() bool {
	term, _ := r.leader.get()
	return term != 0 && r.raft.State() == raft.Leader && r.raft.CurrentTerm() == term
}

// LeaderChanged gives a channel that closes when Leader may have changed. Take
// it before asking Leader.
func (r *Record) LeaderChanged() <-chan struct{} {
	_, changed := r.leader.get()
	return changed
}

// WaitLeader waits until Leader is true.
func (r *Record) WaitLeader(ctx context.Context) error {
	for {
		changed := r.LeaderChanged()
		if r.Leader() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("placement: wait for a leader: %w", context.Cause(ctx))
		case <-r.done:
			return fmt.Errorf("placement: wait for a leader: %w", raft.ErrRaftShutdown)
		}
	}
}

// Fresh returns once the record here holds every change that was answered
// before the call. It goes before each answer that says that something is not
// there. minIndex is what a token or id asks for; on the leader it adds nothing,
// for the leader answers a change only after its own apply.
func (r *Record) Fresh(ctx context.Context, minIndex uint64) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("placement: %w", context.Cause(ctx))
	}
	if !r.Leader() {
		return noLeader(nil) // a follower will ask the leader's index and wait for max(that, minIndex)
	}
	if err := r.raft.VerifyLeader().Error(); err != nil {
		return noLeader(err)
	}
	return nil
}

// watchLeadership follows Raft's word. A new leader first applies all that
// earlier ones committed (the barrier), and a new cluster gets its signing key.
func (r *Record) watchLeadership() {
	for {
		select {
		case <-r.done:
			r.leader.set(0)
			return
		case leads := <-r.raft.LeaderCh():
			r.leader.set(0)
			if leads {
				r.establish()
			}
		}
	}
}

const barrierTimeout = 30 * time.Second

func (r *Record) establish() {
	term := r.raft.CurrentTerm()
	for r.raft.State() == raft.Leader && r.raft.CurrentTerm() == term {
		err := r.raft.Barrier(barrierTimeout).Error()
		if err == nil {
			err = r.ensureSigningKey()
		}
		if err == nil {
			r.leader.set(term)
			r.log.Info("this gateway leads the record", "term", term, "index", r.View().Index())
			return
		}
		r.log.Warn("cannot take up the lead yet", "err", err)
		select {
		case <-r.done:
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (r *Record) ensureSigningKey() error {
	if len(r.View().SigningKey()) > 0 {
		return nil
	}
	var key [32]byte
	_, _ = rand.Read(key[:]) // never fails since Go 1.24
	c, err := newCommand(initCluster, initClusterData{key[:]}, time.Now())
	if err != nil {
		return err
	}
	return r.propose(c)
}

// propose puts a command into the log from the leader's own loop.
func (r *Record) propose(c Command) error {
	entry, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("placement: encode %s: %w", c.Kind, err)
	}
	future := r.raft.Apply(entry, enqueueTimeout)
	if err := future.Error(); err != nil {
		return err
	}
	return future.Response().(Result).Err()
}
