package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/refusals"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

const (
	maxAcks    = 64 << 20         // bytes
	lineRows   = 5000             // of one line of the stream, at most
	lineWithin = 10 * time.Second // a reader that takes no line for longer is cut off
)

// controlAPI serves health, metrics and, to daemons of the cluster, the paths of
// package proxylink and
//
//	GET /v1/counters?sessionId=ID → meter.Counts
type controlAPI struct {
	ctx    context.Context // ends when proxyd begins to stop
	served context.Context // ends when the last connection has ended: streams say their last and end
	secret *trust.Secret
	counts *meter.Meter
	ledger *meter.Ledger
	feed   *refusals.Feed
}

func (c *controlAPI) mux() *http.ServeMux {
	mux := http.NewServeMux()
	daemon.Health(mux, c.ready)
	mux.HandleFunc("GET /v1/counters", c.member(c.counters))
	mux.HandleFunc("GET /v1/ledger", c.member(c.rows))
	mux.HandleFunc("GET /v1/ledger/stream", c.member(c.follow))
	mux.HandleFunc("POST /v1/ledger/acks", c.member(c.acknowledge))
	mux.HandleFunc("GET /v1/refusals", c.member(c.refusals))
	return mux
}

func (c *controlAPI) ready() error {
	if c.ctx.Err() != nil {
		return errors.New("proxyd is stopping")
	}
	return c.ledger.Err()
}

// member lets daemons of the cluster in.
func (c *controlAPI) member(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !c.secret.Check(r.Header.Get(trust.Header)) {
			answer(w, http.StatusUnauthorized, apierr.New(apierr.Unauthorized, "the cluster secret's proof is missing or wrong"))
			return
		}
		h(w, r)
	}
}

func (c *controlAPI) counters(w http.ResponseWriter, r *http.Request) {
	id := r.URL.Query().Get("sessionId")
	if id == "" {
		answer(w, http.StatusBadRequest, apierr.New(apierr.InvalidRequest, "sessionId: name a session"))
		return
	}
	answer(w, http.StatusOK, c.counts.Session(id))
}

func (c *controlAPI) rows(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, ledgerOf(c.counts.Rows()))
}

func (c *controlAPI) acknowledge(w http.ResponseWriter, r *http.Request) {
	var l proxylink.Ledger
	if err := json.NewDecoder(io.LimitReader(r.Body, maxAcks)).Decode(&l); err != nil {
		answer(w, http.StatusBadRequest, apierr.Wrap(err, apierr.InvalidRequest, "body: must be a ledger"))
		return
	}
	c.counts.Acknowledge(l.Rows)
	w.WriteHeader(http.StatusNoContent)
}

// follow writes the ledger's stream: all rows, then each Beat what changed.
func (c *controlAPI) follow(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	tick := time.NewTicker(proxylink.Beat)
	defer tick.Stop()
	var version uint64
	for last := false; ; {
		rows, now := c.counts.Changed(version)
		if err := writeRows(w, rows); err != nil || last {
			return
		}
		version = now
		select {
		case <-tick.C:
		case <-c.served.Done():
			last = true
		case <-r.Context().Done():
			return
		}
	}
}

func (c *controlAPI) refusals(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer context.AfterFunc(c.served, cancel)()
	defer cancel()
	c.feed.ServeHTTP(w, r.WithContext(ctx))
}

// writeRows writes at least one line.
func writeRows(w http.ResponseWriter, rows []proxylink.Row) error {
	out := http.NewResponseController(w)
	if err := out.SetWriteDeadline(time.Now().Add(lineWithin)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	lines := slices.Collect(slices.Chunk(rows, lineRows))
	if len(lines) == 0 {
		lines = append(lines, nil)
	}
	enc := json.NewEncoder(w)
	for _, line := range lines {
		if err := enc.Encode(ledgerOf(line)); err != nil {
			return err
		}
	}
	return out.Flush()
}

// ledgerOf makes of no rows an empty list.
func ledgerOf(rows []proxylink.Row) proxylink.Ledger {
	return proxylink.Ledger{Rows: append([]proxylink.Row{}, rows...)}
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}
