package meter

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/store"
)

const (
	flushEvery = time.Second
	bucket     = "rows"
)

var flushFailures = daemon.Counter("berth_proxyd_ledger_failures_total")

// Ledger is the file of a meter's rows.
type Ledger struct {
	m   *Meter
	db  *store.DB
	log *slog.Logger

	mu  sync.Mutex // one flush at a time; guards err
	err error
}

// Keep gives a meter the ledger in the file at path, made if absent: the rows
// of earlier runs come into the meter, and Run writes its own.
func Keep(m *Meter, path string, log *slog.Logger) (*Ledger, error) {
	db, err := store.Open(path, store.Options{})
	if err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	rows, err := load(db)
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("ledger %s: %w", path, err)
	}
	m.adopt(rows)
	return &Ledger{m: m, db: db, log: log}, nil
}

func load(db *store.DB) (rows []proxylink.Row, err error) {
	err = db.View(func(tx *store.Tx) error {
		return tx.Scan(bucket, "", func(key string, raw json.RawMessage) error {
			var r proxylink.Row
			if err := json.Unmarshal(raw, &r); err != nil {
				return fmt.Errorf("row %q: %w", key, err)
			}
			rows = append(rows, r)
			return nil
		})
	})
	return rows, err
}

// Run writes once a second what has changed, until ctx ends.
func (l *Ledger) Run(ctx context.Context) {
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_ = l.Flush() // said in the log and by Err; the next one may succeed
		}
	}
}

// Flush writes what has changed since the last one. When it returns without
// error, all that was counted before the call survives the computer's death.
func (l *Ledger) Flush() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	rows, gone := l.m.unsaved()
	if len(rows) == 0 && len(gone) == 0 {
		return l.err
	}
	err := l.db.Update(func(tx *store.Tx) error {
		for _, r := range rows {
			if err := tx.Put(bucket, fileKey(keyOf(r)), r); err != nil {
				return err
			}
		}
		for _, k := range gone {
			if err := tx.Delete(bucket, fileKey(k)); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		l.m.written(rows, gone)
	}
	return l.note(err)
}

// note keeps a flush's outcome, and logs where it is another than the last.
func (l *Ledger) note(err error) error {
	if err != nil {
		err = fmt.Errorf("write the ledger: %w", err)
		flushFailures.Inc()
	}
	switch was := l.err; {
	case err != nil && was == nil:
		l.log.Error("counted bytes are in memory only", "error", err)
	case err == nil && was != nil:
		l.log.Info("the ledger is written again")
	}
	l.err = err
	return err
}

// Err says why the last flush failed, nil when it did not.
func (l *Ledger) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Close flushes and closes the file. Run has ended.
func (l *Ledger) Close() error {
	err := l.Flush()
	if closed := l.db.Close(); err == nil {
		err = closed
	}
	return err
}

func fileKey(k rowKey) string {
	return strings.Join([]string{k.session, string(k.typ), strconv.FormatInt(k.hour, 10), k.incarnation}, "/")
}
