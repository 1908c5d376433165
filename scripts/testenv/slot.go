package testenv

import (
	"context"
	"regexp"
	"strconv"
	"testing"
)

// InSlot runs fn on a thread inside a slot's network namespace: sockets that it
// opens are there for good.
func (e *Env) InSlot(t testing.TB, slot string, fn func() error) {
	t.Helper()
	if err := inNamespace("/run/netns/"+slot, fn); err != nil {
		t.Fatal(err)
	}
}

var counted = regexp.MustCompile(`packets (\d+)`)

// BrowserRefused is how many packets of Chrome the slot's rules have refused
// since the slot was made.
func (e *Env) BrowserRefused(t testing.TB, slot string) int {
	t.Helper()
	out, err := output(context.Background(), "ip", "netns", "exec", slot, "nft", "list", "counter", "inet", "slot", "browser_refused")
	if err != nil {
		t.Fatal(err)
	}
	m := counted.FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("no count in %q", out)
	}
	n, _ := strconv.Atoi(m[1])
	return n
}
