package meter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open gives a connection of session s of project p.
func open(t testing.TB, m *Meter, s string) *Conn {
	t.Helper()
	c, err := m.Open(s, "p")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func keep(t testing.TB, m *Meter, path string) *Ledger {
	t.Helper()
	l, err := Keep(m, path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// sums adds rows up by type.
func sums(rows []proxylink.Row) map[egress.Type]bytes {
	all := map[egress.Type]bytes{}
	for _, r := range rows {
		b := all[r.Type]
		all[r.Type] = bytes{b.up + r.Up, b.down + r.Down}
	}
	return all
}

func TestOnlyProxyDataIsInTheLedger(t *testing.T) {
	m := New(10)
	c := open(t, m, "s")
	c.Via(egress.None).Up(1000)
	c.Via(egress.Residential).Up(1)
	c.Via(egress.Residential).Down(2)
	c.Via(egress.Custom).Down(3)
	c.Via(egress.Datacenter) // nothing went
	got := sums(m.Rows())
	if len(got) != 2 || got[egress.Residential] != (bytes{1, 2}) || got[egress.Custom] != (bytes{0, 3}) {
		t.Errorf("%+v", got)
	}
	if counts := m.Session("s"); counts.Up != 1001 || counts.Down != 5 {
		t.Errorf("%+v", counts)
	}
}

// Each byte is booked in the hour in which it went, on one connection too, and
// a clock that goes back takes no hour back.
func TestHours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := New(10)
		f := open(t, m, "s").Via(egress.Residential)
		first := time.Now().Unix() / 3600
		for i := range 3 {
			f.Up(int64(i + 1))
			time.Sleep(time.Hour)
		}
		hours := map[int64]int64{}
		for _, r := range m.Rows() {
			hours[r.Hour] = r.Up
		}
		if len(hours) != 3 || hours[first] != 1 || hours[first+1] != 2 || hours[first+2] != 3 {
			t.Errorf("%v from %d", hours, first)
		}
		m.mu.Lock()
		m.hour += 2 // it has been later than the clock says now
		ahead := m.hour
		m.mu.Unlock()
		open(t, m, "late").Via(egress.Residential).Up(9)
		for _, r := range m.Rows() {
			if r.SessionID == "late" && r.Hour != ahead {
				t.Errorf("booked in hour %d, want %d", r.Hour, ahead)
			}
		}
	})
}

// What is acknowledged is not told again, and goes when it cannot grow any more:
// not in its hour, not while the session has a connection.
func TestAcknowledgedRowsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := New(10)
		c := open(t, m, "s")
		f := c.Via(egress.Residential)
		f.Up(5)
		told := m.Rows()
		m.Acknowledge(told)
		if len(m.Rows()) != 0 || len(m.rows) != 1 {
			t.Fatalf("%d told, %d kept", len(m.Rows()), len(m.rows))
		}
		f.Up(1)
		if rows := m.Rows(); len(rows) != 1 || rows[0].Up != 6 {
			t.Fatalf("after another byte: %+v", rows)
		}
		m.Acknowledge(told) // late news of the old value
		if len(m.Rows()) != 1 {
			t.Fatal("a row went although the record has it only in part")
		}
		m.Acknowledge(m.Rows())
		time.Sleep(2 * time.Hour)
		f.Up(1)
		if m.Rows(); len(m.rows) != 2 {
			t.Fatalf("%d rows kept while the session has a connection, want both hours", len(m.rows))
		}
		c.Close()
		m.Acknowledge(m.Rows())
		if len(m.rows) != 1 {
			t.Fatalf("%d rows kept, want this hour's", len(m.rows))
		}
		time.Sleep(time.Hour)
		if m.Rows(); len(m.rows) != 0 {
			t.Fatalf("%d rows kept", len(m.rows))
		}
		open(t, m, "s").Via(egress.Residential).Up(3) // the session comes back
		if rows := m.Rows(); len(rows) != 1 || rows[0].Up != 3 {
			t.Fatalf("%+v", rows)
		}
	})
}

func TestChangedTellsOnlyWhatChanged(t *testing.T) {
	m := New(10)
	a, b := open(t, m, "a").Via(egress.Custom), open(t, m, "b").Via(egress.Custom)
	a.Up(1)
	b.Up(1)
	rows, v := m.Changed(0)
	if len(rows) != 2 {
		t.Fatalf("%+v", rows)
	}
	if rows, same := m.Changed(v); len(rows) != 0 || same != v {
		t.Fatalf("%+v at %d after %d", rows, same, v)
	}
	b.Down(1)
	rows, next := m.Changed(v)
	if len(rows) != 1 || rows[0].SessionID != "b" {
		t.Fatalf("%+v", rows)
	}
	if rows, _ := m.Changed(v); len(rows) != 1 { // another stream, not so far yet
		t.Fatalf("%+v", rows)
	}
	if rows, _ := m.Changed(next); len(rows) != 0 {
		t.Fatalf("%+v", rows)
	}
}

// An earlier run's rows come back until they are acknowledged, beside those of
// the next one.
func TestEarlierRunsAreToldAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	for run := range 3 {
		m := New(10)
		l := keep(t, m, path)
		if rows := m.Rows(); len(rows) != run {
			t.Fatalf("run %d begins with %+v", run, rows)
		}
		open(t, m, "s").Via(egress.Residential).Up(int64(run + 1))
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	m := New(10)
	l := keep(t, m, path)
	rows := m.Rows()
	if got := sums(rows)[egress.Residential]; len(rows) != 3 || got.up != 6 {
		t.Fatalf("%+v", rows)
	}
	m.Acknowledge(rows[:2])
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	m = New(10)
	l = keep(t, m, path)
	if left := m.Rows(); len(left) != 1 || left[0] != rows[2] {
		t.Fatalf("%+v, want %+v", left, rows[2])
	}
	m.Acknowledge(rows)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if rows := inFile(t, path); len(rows) != 0 {
		t.Errorf("left in the file: %+v", rows)
	}
}

func inFile(t *testing.T, path string) []proxylink.Row {
	t.Helper()
	db, err := store.Open(path, store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := load(db)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func TestABadFileIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	db, err := store.Open(path, store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(func(tx *store.Tx) error { return tx.Put(bucket, "k", "no row") }); err != nil {
		t.Fatal(err)
	}
	if _, err := Keep(New(1), path, slog.New(slog.DiscardHandler)); !errors.Is(err, store.ErrLocked) {
		t.Errorf("a file in use: %v", err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Keep(New(1), path, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a file that holds no rows was taken")
	}
}

// A disk that fails for a while loses nothing, and readiness says so.
func TestAFailedFlushIsTriedAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	m := New(10)
	l := keep(t, m, path)
	open(t, m, "s").Via(egress.Residential).Up(5)
	good := l.db
	closed, err := store.Open(filepath.Join(t.TempDir(), "x.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	l.db = closed
	if err := l.Flush(); err == nil || l.Err() == nil {
		t.Fatal("a flush into a closed file succeeded")
	}
	l.db = good
	if err := l.Flush(); err != nil || l.Err() != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if rows := inFile(t, path); len(rows) != 1 || rows[0].Up != 5 {
		t.Errorf("%+v", rows)
	}
}

// However connections, hours, tellings, acknowledgements, flushes and kills
// mix, a record that merges by maximum has what was carried, but for what a kill
// took: at most what came after both the last flush and the last telling.
func TestLedgerProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(*testing.T) { ledgerRun(t, rt) })
	})
}

func ledgerRun(t *testing.T, rt *rapid.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	m := New(100)
	l := keep(t, m, path)
	record := map[rowKey]proxylink.Row{}
	merge := func(rows []proxylink.Row) {
		for _, r := range rows {
			known := record[keyOf(r)]
			r.Up, r.Down = max(r.Up, known.Up), max(r.Down, known.Down)
			record[keyOf(r)] = r
		}
	}
	var conns []*Conn
	carried, lost, unsafe := int64(0), int64(0), int64(0) // unsafe: since the last flush or telling
	for range rapid.IntRange(1, 60).Draw(rt, "steps") {
		switch rapid.IntRange(0, 9).Draw(rt, "step") {
		case 0:
			conns = append(conns, open(t, m, rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "session")))
		case 1, 2, 3:
			if len(conns) > 0 {
				n := rapid.Int64Range(0, 1<<30).Draw(rt, "bytes")
				f := rapid.SampledFrom(conns).Draw(rt, "conn").Via(rapid.SampledFrom([]egress.Type{egress.Residential, egress.Custom}).Draw(rt, "type"))
				f.Up(n)
				f.Down(2 * n)
				carried, unsafe = carried+3*n, unsafe+3*n
			}
		case 4:
			if i := len(conns) - 1; i >= 0 {
				conns[i].Close()
				conns = conns[:i]
			}
		case 5:
			time.Sleep(time.Duration(rapid.IntRange(1, 90).Draw(rt, "minutes")) * time.Minute)
		case 6:
			if err := l.Flush(); err != nil {
				rt.Fatal(err)
			}
			unsafe = 0
		case 7: // told, and the acknowledgement arrives or not
			rows := m.Rows()
			merge(rows)
			unsafe = 0
			if rapid.Bool().Draw(rt, "acknowledged") {
				m.Acknowledge(rows)
			}
		case 8: // kill -9: the file stays as the last flush left it
			if err := l.db.Close(); err != nil {
				rt.Fatal(err)
			}
			lost, unsafe, conns = lost+unsafe, 0, nil
			m = New(100)
			l = keep(t, m, path)
		case 9: // a stop
			if err := l.Close(); err != nil {
				rt.Fatal(err)
			}
			unsafe, conns = 0, nil
			m = New(100)
			l = keep(t, m, path)
		}
	}
	merge(m.Rows())
	var sum int64
	for _, r := range record {
		sum += r.Up + r.Down
	}
	if sum > carried || sum < carried-lost {
		rt.Fatalf("the record has %d of %d, a kill may have taken %d", sum, carried, lost)
	}
	if err := l.Close(); err != nil {
		rt.Fatal(err)
	}
}

// Counting, telling and flushing at once, under the race detector: nothing is
// lost between them.
func TestCountingBesideFlushes(t *testing.T) {
	m := New(100)
	l := keep(t, m, filepath.Join(t.TempDir(), "ledger.db"))
	ctx, cancel := context.WithCancel(context.Background())
	var readers, writers sync.WaitGroup
	readers.Go(func() { l.Run(ctx) })
	record := map[rowKey]proxylink.Row{}
	readers.Go(func() {
		for version := uint64(0); ctx.Err() == nil; {
			var rows []proxylink.Row
			rows, version = m.Changed(version)
			for _, r := range rows {
				record[keyOf(r)] = r
			}
			m.Acknowledge(rows)
			if err := l.Flush(); err != nil {
				t.Error(err)
			}
		}
	})
	var carried atomic.Int64
	for i := range 8 {
		writers.Go(func() {
			for range 50 {
				c := open(t, m, strconv.Itoa(i%3))
				f := c.Via(egress.Datacenter)
				for range 20 {
					n := rand.Int64N(1 << 20)
					f.Up(n)
					f.Down(n)
					carried.Add(2 * n)
				}
				c.Close()
			}
		})
	}
	writers.Wait()
	cancel()
	readers.Wait()
	for _, r := range m.Rows() {
		record[keyOf(r)] = r
	}
	var sum int64
	for _, r := range record {
		sum += r.Up + r.Down
	}
	if sum != carried.Load() {
		t.Errorf("the record has %d of %d", sum, carried.Load())
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// A process that is killed with SIGKILL while it counts: the next one has, at
// least, all that a flush had returned for, and at most what was counted.
func TestKill(t *testing.T) {
	if path := os.Getenv("BERTH_TEST_LEDGER"); path != "" {
		countUntilKilled(t, path)
	}
	path := filepath.Join(t.TempDir(), "ledger.db")
	for round := range 3 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), "BERTH_TEST_LEDGER="+path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		dec, last := json.NewDecoder(out), said{}
		for range 20 + 13*round {
			if err := dec.Decode(&last); err != nil {
				t.Fatal(err)
			}
		}
		_ = cmd.Process.Kill()
		for dec.Decode(&last) == nil { // what it still said
		}
		_ = cmd.Wait()
		m := New(1)
		l := keep(t, m, path)
		got := int64(0)
		for _, r := range m.Rows() {
			if r.Incarnation == last.Incarnation {
				got += r.Up
			}
		}
		if got < last.Flushed || got > last.Flushed+last.Step {
			t.Errorf("round %d: %d bytes, %d were flushed and at most %d more counted", round, got, last.Flushed, last.Step)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

type said struct {
	Incarnation   string
	Flushed, Step int64
}

func countUntilKilled(t *testing.T, path string) {
	m := New(1)
	l := keep(t, m, path)
	f := open(t, m, "s").Via(egress.Residential)
	enc := json.NewEncoder(os.Stdout)
	for sum := int64(0); ; sum += 100 {
		_ = enc.Encode(said{m.incarnation, sum, 100})
		f.Up(100)
		if err := l.Flush(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

// The way of every byte: no lock, no memory.
func BenchmarkFlow(b *testing.B) {
	m := New(10)
	f := open(b, m, "s").Via(egress.Residential)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			f.Up(1)
		}
	})
}

// A flush of as many sessions as a large proxyd has at once.
func BenchmarkFlush(b *testing.B) {
	m := New(10)
	l := keep(b, m, filepath.Join(b.TempDir(), "ledger.db"))
	flows := make([]*Flow, 10_000)
	for i := range flows {
		flows[i] = open(b, m, strconv.Itoa(i)).Via(egress.Residential)
	}
	for b.Loop() {
		for _, f := range flows {
			f.Up(1)
		}
		if err := l.Flush(); err != nil {
			b.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
}
