package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	hostsession "github.com/berth-dev/berth/hostd/session"
	"github.com/berth-dev/berth/hostd/snapshot"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/blob"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// snapshots gives snapshot.Store the shape that sessions want, and decides what
// goes to the blob store: the captures of pauses, since those of moves have done
// their work in a moment.
type snapshots struct {
	*snapshot.Store
	blobs *blob.Bucket // nil: none
}

var _ hostsession.Snapshots = snapshots{}

// openSnapshots opens the store in dir; where names the blob store, empty for
// none.
func openSnapshots(ctx context.Context, dir, where string, log *slog.Logger) (s snapshots, err error) {
	var bucket snapshot.Bucket
	if where != "" {
		if s.blobs, err = blob.Open(ctx, where); err != nil {
			return s, fmt.Errorf("--blob-url: %w", err)
		}
		bucket = s.blobs
	}
	if s.Store, err = snapshot.Open(dir, bucket, log); err != nil {
		if s.blobs != nil {
			err = errors.Join(err, s.blobs.Close())
		}
		return s, err
	}
	daemon.Gauge("berth_snapshots_not_durable", func() float64 { n, _ := s.Pending(); return float64(n) })
	daemon.Gauge("berth_snapshots_not_durable_seconds", func() float64 {
		if n, oldest := s.Pending(); n > 0 {
			return time.Since(oldest).Seconds()
		}
		return 0
	})
	return s, nil
}

func (s snapshots) close() error {
	err := s.Store.Close()
	if s.blobs != nil {
		err = errors.Join(err, s.blobs.Close())
	}
	return err
}

// draft gives snapshot.Draft the shape that sessions want.
type draft struct {
	*snapshot.Draft
	s     snapshots
	ref   snapshot.Ref
	order hostlink.Capture
}

func (s snapshots) Draft(ctx context.Context, sessionID string, o hostlink.Capture) (hostsession.Draft, error) {
	order, err := s.order(sessionID, o)
	if err != nil {
		return nil, err
	}
	d, err := s.Store.Draft(ctx, order)
	if err != nil {
		return nil, err
	}
	return draft{d, s, order.Ref, o}, nil
}

func (d draft) Export(ctx context.Context, have []string) (io.ReadCloser, error) {
	e, err := d.Draft.Export(ctx, have...)
	if err != nil {
		return nil, err
	}
	return e, nil
}

func (d draft) Write(ctx context.Context, c machine.Capture) (session.Snapshot, error) {
	info, err := d.Draft.Write(ctx, c)
	if err != nil {
		return session.Snapshot{}, err
	}
	return d.s.written(ctx, d.ref, d.order, info)
}

func (s snapshots) Hold(ctx context.Context, sessionID string, r io.Reader) (hostsession.Held, error) {
	h, err := s.Store.Hold(ctx, sessionID, r)
	if err != nil {
		return nil, explain(err)
	}
	return held{h}, nil
}

// held gives snapshot.Held the shape that sessions want.
type held struct{ *snapshot.Held }

func (h held) Open(key []byte) (machine.Capture, error) {
	if len(key) != len(snapshot.Key{}) {
		return nil, fmt.Errorf("a key of %d bytes", len(key))
	}
	c, err := h.Held.Open(snapshot.Key(key))
	return c, explain(err)
}

func (s snapshots) WritePortable(ctx context.Context, sessionID string, o hostlink.Capture, state io.Reader) (session.Snapshot, error) {
	order, err := s.order(sessionID, o)
	if err != nil {
		return session.Snapshot{}, err
	}
	info, err := s.Store.WritePortable(ctx, order, state)
	if err != nil {
		return session.Snapshot{}, err
	}
	return s.written(ctx, order.Ref, o, info)
}

// order is what the store is asked for.
func (s snapshots) order(sessionID string, o hostlink.Capture) (snapshot.Order, error) {
	order := snapshot.Order{Ref: snapshot.Ref{ID: o.SnapshotID, SessionID: sessionID}, Previous: o.Previous}
	if copy(order.Key[:], o.Key) != len(order.Key) || len(o.Key) != len(order.Key) {
		return order, fmt.Errorf("a key of %d bytes", len(o.Key))
	}
	if o.Durable && s.blobs == nil {
		return order, apierr.New(apierr.Internal, "the pause has to be durable, and this host has no blob store (--blob-url)")
	}
	return order, s.Drop(o.SnapshotID) // written before, and never answered for
}

// written does what is to be done with a snapshot that is on the disk.
func (s snapshots) written(ctx context.Context, ref snapshot.Ref, o hostlink.Capture, info snapshot.Info) (session.Snapshot, error) {
	if err := s.upload(ctx, ref, o); err != nil {
		return session.Snapshot{}, errors.Join(err, s.Store.Delete(context.WithoutCancel(ctx), ref))
	}
	return session.Snapshot{ID: info.ID, Memory: info.Memory, Driver: info.Driver, CPUClass: info.CPUClass, Template: info.Template,
		Bytes: info.Bytes, Durable: s.Durable(info.ID)}, nil
}

func (s snapshots) upload(ctx context.Context, ref snapshot.Ref, o hostlink.Capture) error {
	if o.Kind != session.Pause {
		return nil
	}
	if err := s.Upload(ctx, ref); err != nil || !o.Durable {
		return err
	}
	return s.WaitDurable(ctx, ref.ID)
}

func (s snapshots) Load(ctx context.Context, sessionID, id string, key []byte) (machine.Capture, error) {
	l, err := s.load(ctx, sessionID, id, key)
	if err != nil {
		return nil, err
	}
	if l.Memory == nil {
		return nil, errors.Join(fmt.Errorf("snapshot %s holds no memory", id), l.Close())
	}
	return l.Memory, nil
}

func (s snapshots) LoadPortable(ctx context.Context, sessionID, id string, key []byte) (io.ReadCloser, error) {
	l, err := s.load(ctx, sessionID, id, key)
	if err != nil {
		return nil, err
	}
	if l.Portable == nil {
		return nil, errors.Join(fmt.Errorf("snapshot %s is a memory", id), l.Close())
	}
	return l.Portable, nil
}

func (s snapshots) load(ctx context.Context, sessionID, id string, key []byte) (*snapshot.Loaded, error) {
	if len(key) != len(snapshot.Key{}) {
		return nil, fmt.Errorf("a key of %d bytes", len(key))
	}
	l, err := s.Store.Load(ctx, snapshot.Ref{ID: id, SessionID: sessionID}, snapshot.Key(key))
	return l, explain(err)
}

// words say in a sentence why a snapshot is refused.
var words = map[snapshot.Reason]string{
	snapshot.Damaged:   "damaged",
	snapshot.Truncated: "truncated",
	snapshot.Version:   "of a format that this version of hostd does not read",
	snapshot.Foreign:   "another session's",
	snapshot.Missing:   "incomplete",
}

// explain gives errors of the store a sentence and a code.
func explain(err error) error {
	var refused *snapshot.Refused
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		return apierr.Wrap(err, apierr.Internal, "the session's snapshot cannot be restored: it is %s", words[refused.Reason])
	case errors.Is(err, snapshot.ErrNotFound):
		return apierr.Wrap(err, apierr.NotFound, "the session's snapshot is neither on its host nor in the blob store")
	}
	return err
}

func (s snapshots) Has(id string) bool { _, ok := s.Info(id); return ok }

func (s snapshots) Parts(sessionID string) []string { return s.Packs(sessionID) }

func (s snapshots) Export(ctx context.Context, id string, have []string) (io.ReadCloser, error) {
	info, ok := s.Info(id)
	if !ok {
		return nil, explain(snapshot.ErrNotFound)
	}
	e, err := s.Store.Export(ctx, snapshot.Ref{ID: id, SessionID: info.SessionID}, have...)
	if err != nil {
		return nil, explain(err)
	}
	return e, nil
}

func (s snapshots) Import(ctx context.Context, sessionID, id string, r io.Reader) error {
	return explain(s.Store.Import(ctx, snapshot.Ref{ID: id, SessionID: sessionID}, r))
}

// Delete removes a snapshot. What other hosts have brought to the blob store goes
// with its session, or by them, or, when they are away, by its name.
func (s snapshots) Delete(ctx context.Context, id, sessionID string) error {
	if info, ok := s.Info(id); ok {
		sessionID = info.SessionID
	}
	if sessionID == "" {
		return nil
	}
	return s.Store.Delete(ctx, snapshot.Ref{ID: id, SessionID: sessionID})
}

func (s snapshots) Drop(id string) error {
	if !s.Has(id) {
		return nil
	}
	return s.Sweep(func(other string) bool { return other != id })
}

func (s snapshots) List() (all, durable []string) {
	for _, i := range s.Store.List() {
		all = append(all, i.ID)
		if i.Durable {
			durable = append(durable, i.ID)
		}
	}
	return all, durable
}
