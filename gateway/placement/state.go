package placement

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/hashicorp/go-memdb"

	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// State is the record as a plain type: commands in, views out, no Raft. Apply
// and Restore are called by one goroutine, View by any.
type State struct{ db *memdb.MemDB }

// NewState makes an empty one.
func NewState() *State {
	db, err := memdb.NewMemDB(schema)
	if err != nil {
		panic("placement: schema: " + err.Error()) // a constant of this package
	}
	s := &State{db}
	txn := db.Txn(true)
	must(txn.Insert(tabHead, &head{}))
	txn.Commit()
	return s
}

// must ends the process on an error that only a wrong schema can cause; a
// record that went on would differ from the others'.
func must(err error) {
	if err != nil {
		panic("placement: " + err.Error())
	}
}

const snapshotVersion = 1

// A snapshot is lines of JSON: the header, then one line for each row.
type snapshotHeader struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
	Head    head   `json:"head"`
	Rows    int    `json:"rows"` // a torn snapshot is seen
}

type snapshotRow struct {
	Table string          `json:"t"`
	Row   json.RawMessage `json:"r"`
}

const snapshotFormat = "berth-record"

// Write writes the view as a snapshot.
func (v *View) Write(w io.Writer) error {
	out := bufio.NewWriterSize(w, 64<<10)
	enc := json.NewEncoder(out)
	header := snapshotHeader{Format: snapshotFormat, Version: snapshotVersion, Head: *v.head}
	for _, t := range tables {
		for range rows[any](v, t, byID, nil) {
			header.Rows++
		}
	}
	if err := enc.Encode(header); err != nil {
		return err
	}
	for _, t := range tables {
		for row := range rows[any](v, t, byID, nil) {
			raw, err := json.Marshal(row)
			if err == nil {
				err = enc.Encode(snapshotRow{t, raw})
			}
			if err != nil {
				return err
			}
		}
	}
	return out.Flush()
}

// Restore replaces everything by a snapshot, in one step: a bad snapshot
// changes nothing, and who watches a row sees the change.
func (s *State) Restore(r io.Reader) error {
	dec := json.NewDecoder(bufio.NewReader(r))
	var header snapshotHeader
	if err := dec.Decode(&header); err != nil {
		return fmt.Errorf("placement: snapshot header: %w", err)
	}
	if header.Format != snapshotFormat || header.Version != snapshotVersion {
		return fmt.Errorf("placement: snapshot %q of version %d: this Berth reads version %d", header.Format, header.Version, snapshotVersion)
	}
	txn := s.db.Txn(true)
	defer txn.Abort()
	for _, t := range tables {
		if _, err := txn.DeleteAll(t, byID+"_prefix", []byte{}); err != nil {
			return fmt.Errorf("placement: restore: %w", err)
		}
	}
	for i := range header.Rows {
		if err := restoreRow(txn, dec); err != nil {
			return fmt.Errorf("placement: snapshot row %d: %w", i, err)
		}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("placement: snapshot goes on after its last row")
	}
	if err := txn.Insert(tabHead, &header.Head); err != nil {
		return fmt.Errorf("placement: restore: %w", err)
	}
	txn.Commit()
	return nil
}

var newRow = map[string]func() any{
	tabPlans:    func() any { return new(Plan) },
	tabProjects: func() any { return new(Project) },
	tabKeys:     func() any { return new(Key) },
	tabSessions: func() any { return new(session.Session) },
	tabIdem:     func() any { return new(idemKey) },
	tabAnswers:  func() any { return new(answer) },
	tabUsage:    func() any { return new(proxylink.Row) },
	tabMonths:   func() any { return new(month) },
}

func restoreRow(txn *memdb.Txn, dec *json.Decoder) error {
	var line snapshotRow
	if err := dec.Decode(&line); err != nil {
		return err
	}
	make, ok := newRow[line.Table]
	if !ok {
		return fmt.Errorf("unknown table %q", line.Table)
	}
	row := make()
	if err := json.Unmarshal(line.Row, row); err != nil {
		return err
	}
	return txn.Insert(line.Table, row)
}
