package main

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
)

const (
	keepNotices = 4096
	// heartbeat keeps an idle stream of notices alive, so that hostd sees a dead one.
	heartbeat = 5 * time.Second
)

// notices are the newest things to tell hostd, numbered from 1. Any number of
// readers; safe for concurrent use.
type notices struct {
	mu      sync.Mutex // guards what follows
	ring    [keepNotices]agentlink.Notice
	last    uint64        // number of the newest, 0 before the first
	changed chan struct{} // closed by the next add
}

func newNotices() *notices { return &notices{changed: make(chan struct{})} }

// add numbers a notice and wakes the readers.
func (n *notices) add(notice agentlink.Notice) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last++
	notice.N = n.last
	n.ring[n.last%keepNotices] = notice
	close(n.changed)
	n.changed = make(chan struct{})
}

// newest is the number of the last one added.
func (n *notices) newest() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.last
}

func (n *notices) event(e event.Event) {
	if e.At.IsZero() {
		e.At = time.Now().UTC()
	}
	n.add(agentlink.Notice{Event: &e})
}

// after gives the kept notices numbered above number, oldest first, and a
// channel that closes when there are more.
func (n *notices) after(number uint64) ([]agentlink.Notice, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	oldest := uint64(1)
	if n.last > keepNotices {
		oldest = n.last - keepNotices + 1
	}
	var list []agentlink.Notice
	for i := max(oldest, number+1); i <= n.last; i++ {
		list = append(list, n.ring[i%keepNotices])
	}
	return list, n.changed
}

// ServeHTTP streams NDJSON from ?after=N until the reader leaves. Blank lines
// are heartbeats.
func (n *notices) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	number, err := strconv.ParseUint(r.URL.Query().Get("after"), 10, 64)
	if err != nil && r.URL.Query().Get("after") != "" {
		reply.Error(w, r, apierr.New(apierr.InvalidRequest, "after: must be the number of a notice"))
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w)
	lines := json.NewEncoder(w)
	beat := time.NewTicker(heartbeat)
	defer beat.Stop()
	for {
		list, changed := n.after(number)
		for _, notice := range list {
			if lines.Encode(notice) != nil {
				return
			}
			number = notice.N
		}
		if flush.Flush() != nil {
			return
		}
		select {
		case <-changed:
		case <-beat.C:
			if _, err := w.Write([]byte("\n")); err != nil {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}
