package snapshot

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// until polls for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestUploadAndFetch(t *testing.T) {
	b := newBucket()
	s, m := newStore(t, b), newMachine(1000)
	write(t, s, order("a", ""), m)
	if s.Durable("a") {
		t.Error("durable before the upload")
	}
	durable(t, s, "a")
	first := b.puts
	m.pages[1000] = page(3)
	write(t, s, order("b", "a"), m)
	durable(t, s, "b")
	if b.puts-first > 6 { // claim, manifest, and its own packs: not the old one's again
		t.Errorf("%d puts for the second", b.puts-first)
	}
	if keys := b.keys(); slices.ContainsFunc(keys, func(k string) bool { return strings.HasSuffix(k, ".claim") }) {
		t.Errorf("claims stay: %q", keys)
	}
	if n, _ := s.Pending(); n != 0 {
		t.Errorf("%d pending", n)
	}
	other := newStore(t, b)
	if err := errors.Join(loads(other, ref("b"), testKey, m), wantFiles(other)); err != nil {
		t.Fatal(err)
	}
	if !other.Durable("b") || !reopen(t, s.dir, b).Durable("b") {
		t.Error("what lies in the blob store is not known to be durable")
	}
	if err := other.Forget(t.Context(), ref("b")); err != nil {
		t.Fatal(err)
	}
	if err := loads(other, ref("b"), testKey, m); err != nil {
		t.Errorf("forgotten here and fetched again: %v", err)
	}
	if _, err := other.Load(t.Context(), ref("none"), testKey); !errors.Is(err, ErrNotFound) {
		t.Errorf("none: %v", err)
	}
}

func durable(t *testing.T, s *Store, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := errors.Join(s.Upload(ctx, ref(id)), s.WaitDurable(ctx, id)); err != nil {
		t.Fatal(err)
	}
}

func TestDeleteInTheBlobStoreKeepsWhatOthersNeed(t *testing.T) {
	b := newBucket()
	s, m := newStore(t, b), newMachine(1000)
	write(t, s, order("a", ""), m)
	durable(t, s, "a")
	m.pages[1000] = page(3)
	write(t, s, order("b", "a"), m)
	durable(t, s, "b")
	if err := s.Delete(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	gone(t, s, b, "a")
	other := newStore(t, b)
	if err := loads(other, ref("b"), testKey, m); err != nil {
		t.Fatal(err)
	}
	if err := other.Delete(t.Context(), ref("b")); err != nil { // another host than the one that brought it
		t.Fatal(err)
	}
	until(t, "the blob store is empty", func() bool { return len(b.keys()) == 0 })
	if err := wantFiles(s); err != nil {
		t.Error(err)
	}
}

// A host that dies in the middle of an upload to a folder leaves half an object
// there, under a name of its own. It hinders no removal, and goes with its session.
func TestRemovalBesideHalfAnObject(t *testing.T) {
	b := newBucket()
	s := newStore(t, b)
	write(t, s, order("a", ""), newMachine(10))
	durable(t, s, "a")
	half := folderKey("session") + "0123.pack.18c.tmp"
	if err := b.Put(t.Context(), half, strings.NewReader("BERTH")); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	gone(t, s, b, "a")
	if keys := b.keys(); !slices.Equal(keys, []string{half}) {
		t.Errorf("left: %q", keys)
	}
	if err := s.DeleteSession(t.Context(), "session"); err != nil || len(b.keys()) != 0 {
		t.Errorf("%v, left: %q", err, b.keys())
	}
}

func gone(t *testing.T, s *Store, b *memBucket, id string) {
	t.Helper()
	until(t, id+" is removed", func() bool {
		return !s.marked(condemned, id) && !slices.Contains(b.keys(), manifestKey(ref(id)))
	})
}

func TestABlobStoreThatFailsIsTriedAgain(t *testing.T) {
	b, down := newBucket(), errors.New("down")
	s, m := newStore(t, b), newMachine(300)
	write(t, s, order("a", ""), m)
	b.set(down)
	if err := s.Upload(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	until(t, "a try failed", func() bool { return s.queue.lastError("a") != nil })
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.WaitDurable(ended, "a"); !errors.Is(err, down) {
		t.Errorf("waiting says %v", err)
	}
	if n, since := s.Pending(); n != 1 || since.IsZero() {
		t.Errorf("%d pending since %v", n, since)
	}
	if err := loads(s, ref("a"), testKey, m); err != nil {
		t.Errorf("a resume during the upload: %v", err)
	}
	b.set(nil)
	durable(t, s, "a")
}

func TestUploadsAndRemovalsOutliveARestart(t *testing.T) {
	b := newBucket()
	s, m := newStore(t, b), newMachine(300)
	write(t, s, order("a", ""), m)
	durable(t, s, "a")
	write(t, s, order("b", ""), m)
	write(t, s, order("c", ""), m)
	b.set(errors.New("down"))
	if err := errors.Join(s.Delete(t.Context(), ref("a")), s.Upload(t.Context(), ref("b")), s.Close()); err != nil {
		t.Fatal(err)
	}
	b.set(nil)
	s = reopen(t, s.dir, b)
	gone(t, s, b, "a")
	durable(t, s, "b")
	if s.Durable("c") || slices.Contains(b.keys(), manifestKey(ref("c"))) {
		t.Error("one that nobody asked for was uploaded")
	}
	if _, err := s.Write(t.Context(), order("a", ""), m); err != nil {
		t.Errorf("an id that is free again: %v", err)
	}
}

func TestDeleteDuringTheUpload(t *testing.T) {
	b := newBucket()
	b.gate = make(chan struct{})
	s := newStore(t, b)
	write(t, s, order("a", ""), newMachine(300))
	if err := s.Upload(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	b.gate <- struct{}{} // the claim
	b.gate <- struct{}{} // a pack
	waited := make(chan error)
	go func() { waited <- s.WaitDurable(context.Background(), "a") }()
	until(t, "somebody waits or gave up", func() bool { n, _ := s.Pending(); return n == 1 })
	if err := s.Delete(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; !errors.Is(err, ErrNotFound) {
		t.Errorf("waiting for a deleted one: %v", err)
	}
	until(t, "the blob store is empty", func() bool { return len(b.keys()) == 0 })
	until(t, "no file is left", func() bool { return len(filesIn(t, s.dir)) == 0 })
}

// TestACollectionBesideAnUpload removes a pack after the upload saw it.
func TestACollectionBesideAnUpload(t *testing.T) {
	b := newBucket()
	s, m := newStore(t, b), newMachine(300)
	write(t, s, order("a", ""), m)
	durable(t, s, "a")
	m.pages[1001] = page(9)
	write(t, s, order("b", "a"), m)
	b.gate = make(chan struct{})
	if err := s.Upload(t.Context(), ref("b")); err != nil {
		t.Fatal(err)
	}
	b.gate <- struct{}{} // the claim: the packs that are there were looked at when the next put waits
	until(t, "the claim is there", func() bool { return slices.Contains(b.keys(), claimKey(ref("b"))) })
	b.mu.Lock()
	for key := range b.objects { // a host that had looked before the claim
		if strings.HasSuffix(key, ".pack") || strings.HasSuffix(key, "a.manifest") {
			delete(b.objects, key)
		}
	}
	b.mu.Unlock()
	close(b.gate)
	durable(t, s, "b")
	if err := loads(newStore(t, b), ref("b"), testKey, m); err != nil {
		t.Error(err)
	}
}

func TestDeleteSession(t *testing.T) {
	b := newBucket()
	one, two, m := newStore(t, b), newStore(t, b), newMachine(300)
	write(t, one, order("a", ""), m)
	durable(t, one, "a")
	write(t, two, order("b", ""), m)
	stays := order("other", "")
	stays.SessionID = "other"
	write(t, two, stays, m)
	if err := two.Upload(t.Context(), stays.Ref); err != nil {
		t.Fatal(err)
	}
	if err := two.WaitDurable(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	if err := two.DeleteSession(t.Context(), "session"); err != nil {
		t.Fatal(err)
	}
	for _, key := range b.keys() {
		if !strings.HasPrefix(key, "snapshots/other/") {
			t.Errorf("%s is left", key)
		}
	}
	if err := errors.Join(loads(two, stays.Ref, testKey, m), wantFiles(two)); err != nil {
		t.Error(err)
	}
}

func TestWhatTheBlobStoreAlteredIsRefused(t *testing.T) {
	b := newBucket()
	s := newStore(t, b)
	write(t, s, order("a", ""), newMachine(300))
	durable(t, s, "a")
	for _, key := range b.keys() {
		good := b.objects[key]
		bad := bytes.Clone(good)
		bad[len(bad)/2] ^= 1
		b.objects[key] = bad
		other := newStore(t, b)
		wantRefused(t, read(other, ref("a"), testKey))
		if left := filesIn(t, other.dir); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
		b.objects[key] = good
		if strings.HasSuffix(key, ".pack") {
			delete(b.objects, key)
			wantRefused(t, read(other, ref("a"), testKey), Missing)
			b.objects[key] = good
		}
	}
}
