package refusals

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func refused(i int) proxylink.Refused { return proxylink.Refused{SessionID: fmt.Sprint(i)} }

var errEnough = errors.New("enough")

// follow takes n refusals of a host over the wire.
func follow(t *testing.T, c *proxylink.Client, host string, n int) (ids []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err := c.FollowRefusals(ctx, host, func(r proxylink.Refused) error {
		if ids = append(ids, r.SessionID); len(ids) == n {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		t.Fatalf("%v after %v", err, ids)
	}
	return ids
}

// Each host hears of its own, in order, also of what came before it asked.
func TestHostsHearOfTheirs(t *testing.T) {
	f := New()
	srv := httptest.NewServer(f)
	defer srv.Close()
	c := proxylink.NewClient(srv.Listener.Addr().String(), trust.New())
	defer c.Close()
	f.Put("a", refused(1))
	f.Put("b", refused(2))
	f.Put("a", refused(3))
	if got := fmt.Sprint(follow(t, c, "a", 2)); got != "[1 3]" {
		t.Error(got)
	}
	done := make(chan string)
	go func() { done <- fmt.Sprint(follow(t, c, "b", 2)) }()
	f.Put("b", refused(4))
	if got := <-done; got != "[2 4]" {
		t.Error(got)
	}
}

// A second reader ends the first.
func TestTheNewReaderCounts(t *testing.T) {
	f := New()
	srv := httptest.NewServer(f)
	defer srv.Close()
	c := proxylink.NewClient(srv.Listener.Addr().String(), trust.New())
	defer c.Close()
	f.Put("a", refused(1))
	began, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- c.FollowRefusals(context.Background(), "a", func(proxylink.Refused) error { close(began); return nil })
	}()
	<-began
	f.Put("a", refused(2))
	second, ok := f.read("a")
	if !ok {
		t.Fatal("refused")
	}
	defer second.close(nil)
	if err := <-ended; err == nil {
		t.Error("the first reads on")
	}
}

func TestQueuesAreBounded(t *testing.T) {
	f := New()
	before := dropped.Get()
	for i := range maxQueue + 10 {
		f.Put("a", refused(i))
	}
	r, _ := f.read("a")
	list := r.next()
	if len(list) != maxQueue || list[0].SessionID != "10" || dropped.Get()-before != 10 {
		t.Errorf("%d, from %s, %d dropped", len(list), list[0].SessionID, dropped.Get()-before)
	}
	f.Put("a", refused(5000))
	r.close(list) // could not be written: they wait for the next reader
	r, _ = f.read("a")
	if list := r.next(); len(list) != maxQueue || list[0].SessionID != "11" || list[maxQueue-1].SessionID != "5000" {
		t.Errorf("%d, from %s", len(list), list[0].SessionID)
	}
	r.close(nil)
}

func TestQueuesThatNobodyReadsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := New()
		for i := range maxHosts {
			f.Put(fmt.Sprint(i), refused(i))
		}
		f.Put("one more", refused(1))
		if len(f.hosts) != maxHosts {
			t.Fatalf("%d hosts", len(f.hosts))
		}
		time.Sleep(keep)
		f.Put("one more", refused(2))
		if len(f.hosts) != 1 || len(f.hosts["one more"].waiting) != 1 {
			t.Errorf("%d hosts", len(f.hosts))
		}
		time.Sleep(keep)
		r, _ := f.read("one more")
		if list := r.next(); len(list) != 0 {
			t.Errorf("heard after %s: %v", keep, list)
		}
		r.close(nil)
	})
}
