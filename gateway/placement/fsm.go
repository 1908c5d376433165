package placement

import (
	"fmt"
	"io"

	"github.com/hashicorp/raft"
)

// fsm is State's face to Raft and decides nothing.
type fsm State

// Apply runs on every gateway, in the order of the log.
func (f *fsm) Apply(entry *raft.Log) any {
	c, err := decodeCommand(entry.Data)
	if err != nil {
		panic(fmt.Sprintf("log entry %d: %v", entry.Index, err)) // going on would make the records differ
	}
	return (*State)(f).Apply(entry.Index, c)
}

// Snapshot is O(1): the state is immutable.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	return snapshot{(*State)(f).View()}, nil
}

// Restore replaces the state by a snapshot's.
func (f *fsm) Restore(from io.ReadCloser) error {
	defer from.Close()
	return (*State)(f).Restore(from)
}

type snapshot struct{ view *View }

// Persist writes the snapshot, beside further applies.
func (s snapshot) Persist(sink raft.SnapshotSink) error {
	if err := s.view.Write(sink); err != nil {
		_ = sink.Cancel()
		return fmt.Errorf("placement: write snapshot: %w", err)
	}
	return sink.Close()
}

// Release has nothing to free.
func (snapshot) Release() {}
