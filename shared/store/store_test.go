package store

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) {
	if path := os.Getenv("BERTH_TEST_VICTIM"); path != "" {
		victim(path)
	}
	goleak.VerifyTestMain(m)
}

func open(t testing.TB, o Options) *DB {
	t.Helper()
	db, err := Open(filepath.Join(t.TempDir(), "new", "x.db"), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type thing struct{ N int }

func TestValues(t *testing.T) {
	db := open(t, Options{})
	must(t, db.Update(func(tx *Tx) error {
		for i, k := range []string{"a1", "a2", "b1"} {
			if err := tx.Put("outer/inner", k, thing{i}); err != nil {
				return err
			}
		}
		return tx.Put("outer", "flat", thing{9})
	}))
	must(t, db.View(func(tx *Tx) error {
		var got thing
		if ok, err := tx.Get("outer/inner", "a2", &got); !ok || err != nil || got.N != 1 {
			t.Errorf("a2: %v %v %v", got, ok, err)
		}
		for _, path := range [][2]string{{"outer/inner", "c"}, {"outer/none", "a"}, {"none/inner", "a"}, {"outer/inner/none", "a"}} {
			if ok, err := tx.Get(path[0], path[1], &got); ok || err != nil {
				t.Errorf("%v: %v %v", path, ok, err)
			}
		}
		var wrong []string
		if _, err := tx.Get("outer", "flat", &wrong); err == nil {
			t.Error("an object was read into a list")
		}
		var keys []string
		must(t, tx.Scan("outer/inner", "a", func(k string, _ json.RawMessage) error { keys = append(keys, k); return nil }))
		if !reflect.DeepEqual(keys, []string{"a1", "a2"}) {
			t.Errorf("scan of a: %v", keys)
		}
		keys = nil
		must(t, tx.Scan("outer", "", func(k string, _ json.RawMessage) error { keys = append(keys, k); return nil }))
		if !reflect.DeepEqual(keys, []string{"flat"}) {
			t.Errorf("scan beside a bucket: %v", keys)
		}
		stop := errors.New("enough")
		if err := tx.Scan("outer/inner", "", func(string, json.RawMessage) error { return stop }); err != stop {
			t.Errorf("scan's own error: %v", err)
		}
		if names, err := tx.Buckets("outer"); err != nil || !reflect.DeepEqual(names, []string{"inner"}) {
			t.Errorf("buckets: %v %v", names, err)
		}
		if names, err := tx.Buckets(""); err != nil || !reflect.DeepEqual(names, []string{"outer"}) {
			t.Errorf("buckets of the file: %v %v", names, err)
		}
		if names, err := tx.Buckets("none"); err != nil || names != nil {
			t.Errorf("buckets of nothing: %v %v", names, err)
		}
		return nil
	}))
	must(t, db.Update(func(tx *Tx) error {
		return errors.Join(tx.Delete("outer/inner", "a1"), tx.Delete("outer/inner", "never"), tx.Delete("none", "a"), tx.Drop("none"), tx.Drop("outer/none"))
	}))
	must(t, db.Update(func(tx *Tx) error {
		if ok, _ := tx.Get("outer/inner", "a1", new(thing)); ok {
			t.Error("a1 was deleted and is there")
		}
		return tx.Drop("outer/inner")
	}))
	must(t, db.Update(func(tx *Tx) error {
		if names, _ := tx.Buckets("outer"); names != nil {
			t.Errorf("dropped and there: %v", names)
		}
		return tx.Drop("outer")
	}))
}

func TestAFailedUpdateLeavesNothing(t *testing.T) {
	db := open(t, Options{})
	broken := errors.New("broken")
	err := db.Update(func(tx *Tx) error {
		must(t, tx.Put("b", "k", 1))
		return broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	must(t, db.View(func(tx *Tx) error {
		if ok, _ := tx.Get("b", "k", new(int)); ok {
			t.Error("half an update stayed")
		}
		return nil
	}))
	if err := db.View(func(tx *Tx) error { return tx.Put("b", "k", 1) }); err == nil {
		t.Error("a view wrote")
	}
	if err := db.Update(func(tx *Tx) error { return tx.Put("b", "k", func() {}) }); err == nil {
		t.Error("a function was stored")
	}
}

func TestASecondHolderIsToldWhy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	db, err := Open(path, Options{})
	must(t, err)
	defer db.Close()
	_, err = Open(path, Options{LockTimeout: 20 * time.Millisecond})
	if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v", err)
	}
	if _, err := Open("/dev/null/x.db", Options{}); err == nil {
		t.Error("opened below a device")
	}
}

// TestLogAgainstAModel plays random appends, drops and reads, with restarts.
func TestLogAgainstAModel(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		path := filepath.Join(dir, fmt.Sprint(time.Now().UnixNano()))
		db, err := Open(path, Options{NoSync: true})
		must(t, err)
		defer func() { _ = db.Close() }()
		const bucket = "events/s"
		first, last := uint64(1), uint64(0)
		rt.Repeat(map[string]func(*rapid.T){
			"append": func(rt *rapid.T) {
				must(t, db.Update(func(tx *Tx) error {
					seq, err := tx.Append(bucket, func(seq uint64) any { return thing{int(seq) * 10} })
					if last++; seq != last {
						rt.Fatalf("number %d after %d", seq, last-1)
					}
					return err
				}))
			},
			"drop": func(rt *rapid.T) {
				keep := rapid.Uint64Range(0, 6).Draw(rt, "keep")
				want := 0
				for last+1-first > keep {
					first++
					want++
				}
				must(t, db.Update(func(tx *Tx) error {
					n, err := tx.DropOldest(bucket, keep)
					if n != want {
						rt.Fatalf("%d dropped, want %d", n, want)
					}
					return err
				}))
			},
			"restart": func(*rapid.T) {
				must(t, db.Close())
				db, err = Open(path, Options{NoSync: true})
				must(t, err)
			},
			"read": func(rt *rapid.T) {
				after, limit := rapid.Uint64Range(0, last+2).Draw(rt, "after"), rapid.IntRange(1, 5).Draw(rt, "limit")
				var got, want []uint64
				for seq := max(first, after+1); seq <= last && len(want) < limit; seq++ {
					want = append(want, seq)
				}
				must(t, db.View(func(tx *Tx) error {
					if tx.Last(bucket) != last {
						rt.Fatalf("last %d, want %d", tx.Last(bucket), last)
					}
					return tx.After(bucket, after, func(seq uint64, raw json.RawMessage) (bool, error) {
						var v thing
						if json.Unmarshal(raw, &v) != nil || v.N != int(seq)*10 {
							rt.Fatalf("%d holds %s", seq, raw)
						}
						got = append(got, seq)
						return len(got) < limit, nil
					})
				}))
				if !reflect.DeepEqual(got, want) {
					rt.Fatalf("after %d: %v, want %v", after, got, want)
				}
			},
		})
	})
}

func TestAfterTheEndOfNumbers(t *testing.T) {
	db := open(t, Options{})
	must(t, db.Update(func(tx *Tx) error { _, err := tx.Append("l", func(uint64) any { return 1 }); return err }))
	must(t, db.View(func(tx *Tx) error {
		return tx.After("l", ^uint64(0), func(seq uint64, _ json.RawMessage) (bool, error) {
			t.Errorf("%d is after the last of all numbers", seq)
			return true, nil
		})
	}))
}

func TestBatchFromManyAtOnce(t *testing.T) {
	db := open(t, Options{NoSync: true})
	var wg sync.WaitGroup
	const writers, each = 16, 20
	for range writers {
		wg.Go(func() {
			for range each {
				if err := db.Batch(func(tx *Tx) error { _, err := tx.Append("l", func(uint64) any { return 1 }); return err }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	must(t, db.View(func(tx *Tx) error {
		if n := tx.Last("l"); n != writers*each {
			t.Errorf("%d appended, want %d", n, writers*each)
		}
		return nil
	}))
}

// victim appends without fsync and prints each number, until it is killed.
func victim(path string) {
	db, err := Open(path, Options{NoSync: true})
	for err == nil {
		var seq uint64
		err = db.Update(func(tx *Tx) (err error) {
			seq, err = tx.Append("l", func(seq uint64) any { return seq })
			return err
		})
		fmt.Println(seq)
	}
	fmt.Println("error", err)
	os.Exit(1)
}

func TestKill9KeepsWhatWasCommittedWithoutSync(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "BERTH_TEST_VICTIM="+path)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	defer time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() }).Stop()
	var seen uint64
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if _, err := fmt.Sscan(lines.Text(), &seen); err != nil {
			t.Fatal(lines.Text())
		}
		if seen == 500 {
			_ = cmd.Process.Kill()
		}
	}
	_ = cmd.Wait()
	db, err := Open(path, Options{NoSync: true})
	must(t, err)
	defer db.Close()
	var next uint64 = 1
	must(t, db.View(func(tx *Tx) error {
		return tx.After("l", 0, func(seq uint64, _ json.RawMessage) (bool, error) {
			if seq != next {
				t.Fatalf("%d follows %d", seq, next-1)
			}
			next++
			return true, nil
		})
	}))
	if seen < 500 || next <= seen {
		t.Errorf("%d was committed, the log ends at %d", seen, next-1)
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, noSync := range []bool{false, true} {
		b.Run(fmt.Sprint("noSync=", noSync), func(b *testing.B) {
			db := open(b, Options{NoSync: noSync})
			for b.Loop() {
				must(b, db.Update(func(tx *Tx) error { _, err := tx.Append("events/s", func(uint64) any { return thing{1} }); return err }))
			}
		})
	}
}

func TestSkippedNumbersAreNeverGiven(t *testing.T) {
	db := open(t, Options{})
	must(t, db.Update(func(tx *Tx) error {
		must(t, tx.Skip("log", 41))
		must(t, tx.Skip("log", 7)) // less than that: nothing
		seq, err := tx.Append("log", func(uint64) any { return "x" })
		if seq != 42 {
			t.Errorf("number %d", seq)
		}
		return err
	}))
}
