package placement

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/store"
)

func TestMain(m *testing.M) {
	if home := os.Getenv("BERTH_TEST_VICTIM"); home != "" {
		victim(home) // until killed
	}
	goleak.VerifyTestMain(m)
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func config(home string) Config {
	return Config{Name: "gw-1", Home: home, Addr: "127.0.0.1:0", Log: quiet(), Election: 50 * time.Millisecond}
}

// open starts a record that leads, with a project "p" of plan "Wide".
func open(t testing.TB, home string) *Record {
	t.Helper()
	r, err := Open(config(home))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	ready(t, r)
	return r
}

func ready(t testing.TB, r *Record) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.WaitLeader(ctx); err != nil {
		t.Fatal(err)
	}
	err := r.SetPlans(ctx, []Plan{{Name: "Wide", ConcurrentSessions: 1 << 20, MaxTimeoutSeconds: 900}, {Name: "One", ConcurrentSessions: 1, MaxTimeoutSeconds: 900}})
	if err == nil {
		_, err = r.PutKey(ctx, Project{ID: "p", Plan: "Wide"}, Key{Hash: "h"})
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestARestartKeepsTheRecord(t *testing.T) {
	home, ctx := t.TempDir(), context.Background()
	r := open(t, home)
	s, existing, err := r.CreateSession(ctx, draft("a", "p", epoch), "key")
	if err != nil || existing || s.ID != "a" || string(s.UserMetadata) != "{}" {
		t.Fatalf("%+v, %v, %v", s, existing, err)
	}
	if _, _, err := r.EndSession(ctx, "a", 1, epoch.Add(time.Minute), session.Released, ""); err != nil {
		t.Fatal(err)
	}
	keep := true
	b, _, err := r.CreateSession(ctx, draft("b", "p", epoch), "")
	if err != nil {
		t.Fatal(err)
	}
	if b, err = r.PatchSession(ctx, "b", session.Patch{KeepAlive: &keep}); err != nil || !b.KeepAlive {
		t.Fatal(b, err)
	}
	want, secret := dump(t, r.state), r.View().SigningKey()
	if len(secret) != 32 {
		t.Fatalf("a signing key of %d bytes", len(secret))
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}

	again, err := Open(Config{Name: "another-name", Home: home, Addr: "127.0.0.1:0", Log: quiet(), Election: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := again.WaitLeader(wait); err != nil {
		t.Fatal("under another name it does not find itself in the membership: ", err)
	}
	if got := dump(t, again.state); !bytes.Equal(got, want) {
		t.Errorf("after the restart\n%s\nbefore\n%s", got, want)
	}
}

func TestASnapshotAndTheLogAfterItMakeTheRecord(t *testing.T) {
	home, ctx := t.TempDir(), context.Background()
	r := open(t, home)
	for i := range 20 {
		if _, _, err := r.CreateSession(ctx, draft(fmt.Sprint("s", i), "p", epoch), ""); err != nil {
			t.Fatal(err)
		}
		if i == 10 {
			if err := r.raft.Snapshot().Error(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, mode := range map[string]os.FileMode{"snapshots": 0o700, "raft.db": 0o600} { // both hold the signing key
		if info, err := os.Stat(filepath.Join(home, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	want := dump(t, r.state)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(config(home))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := again.WaitLeader(wait); err != nil {
		t.Fatal(err)
	}
	if got := dump(t, again.state); !bytes.Equal(got, want) {
		t.Errorf("restored\n%s\nwant\n%s", got, want)
	}
}

func TestErrorsComeBackTyped(t *testing.T) {
	ctx := context.Background()
	r := open(t, t.TempDir())
	if _, err := r.PutKey(ctx, Project{ID: "one", Plan: "One"}, Key{Hash: "h1"}); err != nil {
		t.Fatal(err)
	}
	s := draft("a", "one", epoch)
	s.Epoch = 2
	if _, _, err := r.CreateSession(ctx, s, ""); err != nil {
		t.Fatal(err)
	}
	_, _, err := r.CreateSession(ctx, draft("b", "one", epoch), "")
	if e := apierr.From(err); e.Code != apierr.ConcurrencyLimit || e.RetryAfter != concurrencyRetry {
		t.Errorf("over the limit: %v", err)
	}
	if _, _, err := r.EndSession(ctx, "a", 1, epoch, session.Released, ""); !errors.Is(err, ErrStaleEpoch) {
		t.Errorf("an older epoch: %v", err)
	}
	if err := r.Fresh(ctx, r.View().Index()+100); err != nil {
		t.Errorf("a token with an index made up made a leader wait: %v", err)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if _, _, err := r.CreateSession(gone, draft("c", "one", epoch), ""); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller who has left: %v", err)
	}
}

func TestWithoutALeaderNothingIsPromised(t *testing.T) {
	ctx := context.Background()
	r, err := Open(Config{Name: "gw-1", Home: t.TempDir(), Addr: "127.0.0.1:0", Log: quiet(), Election: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	_, _, err = r.CreateSession(ctx, draft("a", "p", epoch), "")
	if e := apierr.From(err); e.Code != apierr.Unavailable || e.RetryAfter <= 0 {
		t.Errorf("a create: %v", err)
	}
	if err := r.Fresh(ctx, 0); !apierr.Is(err, apierr.Unavailable) {
		t.Errorf("a fresh read: %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if err := r.WaitLeader(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting: %v", err)
	}
}

func TestASecondGatewayWithTheSameHomeIsToldWhy(t *testing.T) {
	home := t.TempDir()
	_ = open(t, home)
	if _, err := Open(config(home)); !errors.Is(err, store.ErrLocked) {
		t.Errorf("%v", err)
	}
}

func TestAStartThatWasKilledWhileBootstrappingGoesOn(t *testing.T) {
	home := t.TempDir()
	db, err := store.Open(filepath.Join(home, "raft.db"), store.Options{}) // an empty file, as a kill leaves it
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	_ = open(t, home)
}

func TestManyClientsAtOnceHoldTheLimit(t *testing.T) {
	ctx := context.Background()
	r := open(t, t.TempDir())
	const limit, clients = 7, 30
	if err := r.SetPlans(ctx, []Plan{{Name: "Wide", ConcurrentSessions: limit, MaxTimeoutSeconds: 900}}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	made := make(chan error, clients)
	for i := range clients {
		wg.Go(func() {
			_, _, err := r.CreateSession(ctx, draft(fmt.Sprint("s", i), "p", epoch), "")
			made <- err
		})
	}
	wg.Wait()
	close(made)
	ok := 0
	for err := range made {
		if err == nil {
			ok++
		} else if !apierr.Is(err, apierr.ConcurrencyLimit) {
			t.Error(err)
		}
	}
	if ok != limit || r.View().Running("p") != limit {
		t.Errorf("%d creates answered, %d running, limit %d", ok, r.View().Running("p"), limit)
	}
}

func BenchmarkCreate(b *testing.B) {
	for _, clients := range []int{1, 64} {
		b.Run(fmt.Sprint("clients=", clients), func(b *testing.B) {
			r := open(b, b.TempDir())
			work := make(chan int)
			var wg sync.WaitGroup
			for range clients {
				wg.Go(func() {
					for i := range work {
						id := fmt.Sprint("s", i)
						if _, _, err := r.CreateSession(context.Background(), draft(id, "p", epoch), ""); err != nil {
							b.Error(err)
						}
						if err := r.DropSession(context.Background(), id); err != nil {
							b.Error(err)
						}
					}
				})
			}
			b.ResetTimer()
			for i := range b.N {
				work <- i
			}
			close(work)
			wg.Wait()
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(2*b.N), "µs/commit")
		})
	}
}
