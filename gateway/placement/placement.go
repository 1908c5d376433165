// Package placement holds the replicated record: who may do what, and which
// session is where. Every change is a command in one Raft log; every read is
// on an immutable view. Only this package imports hashicorp/raft and go-memdb.
//
// state.go and apply.go are the record itself, a plain type without Raft;
// fsm.go, leader.go and record.go put it behind the log. See DESIGN.md.
package placement

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/store"
)

// Config says where the record lives.
type Config struct {
	Name string       // this gateway's name; the one of the first start is kept as its Raft id
	Home string       // folder for raft.db and snapshots, made if absent
	Addr string       // host:port for Raft; port 0 takes a free one
	Log  *slog.Logger // nil: slog.Default
	// Election is how long a leader may be silent before another is voted for, at
	// least 5 ms; 0: 500 ms. A start takes one to two of it, so tests want it short.
	Election time.Duration
}

const (
	electionTimeout = 500 * time.Millisecond // several round trips between regions
	snapshotsKept   = 2
	dialTimeout     = 5 * time.Second
	lockTimeout     = 2 * time.Second
)

// Record is this gateway's part in the replicated record. All methods may be
// called at once.
type Record struct {
	state  *State
	raft   *raft.Raft
	log    *slog.Logger
	leader leadership
	files  []io.Closer // what is not Raft's own, in order of closing
	done   chan struct{}
	watch  sync.WaitGroup

	closing sync.Once
	closed  error // of Close, set within closing
}

// Open starts Raft on what Home holds; a first start makes a cluster of one.
// It returns before there is a leader: see WaitLeader.
func Open(c Config) (*Record, error) {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if err := os.MkdirAll(c.Home, 0o700); err != nil {
		return nil, fmt.Errorf("placement: %w", err)
	}
	r := &Record{state: NewState(), log: c.Log.With("part", "record"), done: make(chan struct{})}
	if err := r.open(c); err != nil {
		return nil, errors.Join(err, r.closeFiles())
	}
	r.watch.Go(r.watchLeadership)
	return r, nil
}

func (r *Record) open(c Config) error {
	lines := daemon.LineLog(r.log, slog.LevelError)
	path := filepath.Join(c.Home, "raft.db")
	disk, err := raftboltdb.New(raftboltdb.Options{Path: path, BoltOptions: store.BoltOptions(lockTimeout)})
	if err != nil {
		return fmt.Errorf("placement: open %s: %w", path, store.Explain(err))
	}
	r.files = append(r.files, disk)
	if err := private(c.Home, path); err != nil {
		return err
	}
	snapshots, err := raft.NewFileSnapshotStore(c.Home, snapshotsKept, lines)
	if err != nil {
		return fmt.Errorf("placement: snapshots: %w", err)
	}
	transport, err := raft.NewTCPTransport(c.Addr, nil, 3, dialTimeout, lines)
	if err != nil {
		return fmt.Errorf("placement: listen on %s for Raft: %w", c.Addr, err)
	}
	r.files = append([]io.Closer{transport}, r.files...)
	conf := tuning(c, lines)
	if conf.LocalID, err = identity(disk, c.Name); err != nil {
		return err
	}
	if err := bootstrap(conf, disk, snapshots, transport); err != nil {
		return err
	}
	cache, err := raft.NewLogCache(512, disk)
	if err != nil {
		return fmt.Errorf("placement: %w", err)
	}
	r.raft, err = raft.NewRaft(conf, (*fsm)(r.state), cache, disk, snapshots, transport)
	if err != nil {
		return fmt.Errorf("placement: start raft: %w", err)
	}
	return nil
}

// private closes log and snapshots to other users: they hold the signing key.
func private(home, log string) error {
	folder := filepath.Join(home, "snapshots") // the name that raft gives it, with mode 0755
	err := os.MkdirAll(folder, 0o700)
	if err == nil {
		err = errors.Join(os.Chmod(folder, 0o700), os.Chmod(log, 0o600))
	}
	if err != nil {
		return fmt.Errorf("placement: %w", err)
	}
	return nil
}

func tuning(c Config, lines io.Writer) *raft.Config {
	conf := raft.DefaultConfig()
	election := c.Election
	if election == 0 {
		election = electionTimeout
	}
	conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout = election, election, election/2
	conf.CommitTimeout = 5 * time.Millisecond // followers apply 8 ms after the leader's answer, not 80
	conf.BatchApplyCh = true                  // many clients share one fsync
	conf.MaxAppendEntries = 256
	conf.LogOutput, conf.LogLevel = lines, "INFO"
	conf.NoLegacyTelemetry = true
	return conf
}

// identity gives the Raft id: the name of the first start, whatever the flag
// says later, for the id stands in the replicated membership.
func identity(disk raft.StableStore, name string) (raft.ServerID, error) {
	key := []byte("berth-name")
	if kept, err := disk.Get(key); err == nil && len(kept) > 0 {
		return raft.ServerID(kept), nil
	}
	if name == "" {
		return "", errors.New("placement: a gateway needs a name")
	}
	if err := disk.Set(key, []byte(name)); err != nil {
		return "", fmt.Errorf("placement: keep the name: %w", err)
	}
	return raft.ServerID(name), nil
}

// bootstrap makes a cluster of one out of an empty disk.
func bootstrap(conf *raft.Config, disk *raftboltdb.BoltStore, snapshots raft.SnapshotStore, transport raft.Transport) error {
	last, err := disk.LastIndex()
	if err != nil {
		return fmt.Errorf("placement: read the log: %w", err)
	}
	list, err := snapshots.List()
	if err != nil {
		return fmt.Errorf("placement: list snapshots: %w", err)
	}
	if last > 0 || len(list) > 0 {
		return nil
	}
	// BootstrapCluster writes the term before the first entry; killed between
	// the two it would refuse ever after. An empty log has no term to keep.
	if err := disk.SetUint64([]byte("CurrentTerm"), 0); err != nil {
		return fmt.Errorf("placement: bootstrap: %w", err)
	}
	alone := raft.Configuration{Servers: []raft.Server{{ID: conf.LocalID, Address: transport.LocalAddr()}}}
	if err := raft.BootstrapCluster(conf, disk, disk, snapshots, transport, alone); err != nil {
		return fmt.Errorf("placement: bootstrap: %w", err)
	}
	return nil
}

// Close stops Raft and closes the files; again it does nothing more. Commands
// under way fail.
func (r *Record) Close() error {
	r.closing.Do(func() {
		close(r.done)
		err := r.raft.Shutdown().Error()
		r.watch.Wait()
		r.closed = errors.Join(err, r.closeFiles())
	})
	return r.closed
}

func (r *Record) closeFiles() error {
	var errs []error
	for _, c := range r.files {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
