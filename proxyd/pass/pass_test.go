package pass

import (
	"fmt"
	"runtime"
	"testing"
	"time"
	"weak"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

var noon = time.Date(2026, 9, 1, 12, 0, 0, 0, time.UTC)

func seal(t interface{ Fatal(...any) }, secret *trust.Secret, p proxylink.Pass) []byte {
	if p.SessionID == "" {
		p.SessionID = "s"
	}
	if p.Expires.IsZero() {
		p.Expires = noon.Add(time.Hour)
	}
	sealed, err := proxylink.SealPass(secret, p)
	if err != nil {
		t.Fatal(err)
	}
	return sealed
}

func TestAPassIsReadOnce(t *testing.T) {
	secret := trust.New()
	b := NewBook(secret)
	sealed := seal(t, secret, proxylink.Pass{Version: 1, Routes: []proxylink.Route{{Rule: egress.Rule{Type: egress.Custom, DomainPattern: "a"}}}})
	first, newer, refused := b.Open(noon, "s", sealed)
	if refused != nil || newer {
		t.Fatal(refused, newer)
	}
	if again, _, _ := b.Open(noon, "s", append([]byte(nil), sealed...)); again != first {
		t.Error("it was compiled again")
	}
	if _, _, refused := b.Open(noon, "other", sealed); refused == nil || refused.Reason != egress.TokenInvalid {
		t.Errorf("another session's: %v", refused)
	}
	if _, _, refused := b.Open(noon.Add(time.Hour), "s", sealed); refused == nil || refused.Reason != egress.TokenInvalid {
		t.Errorf("expired: %v", refused)
	}
	bent := append([]byte(nil), sealed...)
	bent[5] ^= 1
	if _, _, refused := b.Open(noon, "s", bent); refused == nil {
		t.Error("a bent pass is taken")
	}
	for _, short := range [][]byte{nil, {}, {1}, make([]byte, 16)} {
		if _, _, refused := b.Open(noon, "s", short); refused == nil {
			t.Errorf("%v is taken", short)
		}
	}
}

// Whoever changes a setting again and again fills no memory with what it was.
func TestAReplacedPassIsForgotten(t *testing.T) {
	secret := trust.New()
	b := NewBook(secret)
	open := func(version uint64) weak.Pointer[Pass] {
		p, _, refused := b.Open(noon, "s", seal(t, secret, proxylink.Pass{Version: version}))
		if refused != nil {
			t.Fatal(refused)
		}
		return weak.Make(p)
	}
	first, second := open(1), open(2)
	runtime.GC()
	if first.Value() != nil {
		t.Error("the replaced pass is kept")
	}
	if second.Value() == nil {
		t.Error("the newest pass is not kept")
	}
	runtime.KeepAlive(b)
}

func TestRoute(t *testing.T) {
	secret := trust.New()
	b := NewBook(secret)
	rule := func(kind egress.Type, pattern string) proxylink.Route {
		return proxylink.Route{Rule: egress.Rule{Type: kind, DomainPattern: pattern}}
	}
	p, _, _ := b.Open(noon, "s", seal(t, secret, proxylink.Pass{Version: 1, Routes: []proxylink.Route{
		rule(egress.Custom, `^shop\.`), rule(egress.None, `\.gov$`), rule(egress.Residential, `[0-9]`)}}))
	for host, want := range map[string]int{"shop.test": 0, "SHOP.test": 0, "tax.gov": -1, "10.0.0.1": 2, "plain.test": -1} {
		got, refused := p.Route(host)
		if refused != nil || want < 0 && got != nil || want >= 0 && got != &p.Routes[want] {
			t.Errorf("%s: %v %v", host, got, refused)
		}
	}
	broken, _, refused := b.Open(noon, "s", seal(t, secret, proxylink.Pass{Version: 2, Routes: []proxylink.Route{rule(egress.Custom, "(")}}))
	if refused != nil {
		t.Fatal(refused)
	}
	if _, refused := broken.Route("a"); refused == nil || refused.Reason != egress.BadRoute {
		t.Errorf("%v", refused)
	}
}

// In whatever order passes come, one that is older than the newest seen is
// refused, and no other.
func TestOlderPassesProperty(t *testing.T) {
	secret := trust.New()
	rapid.Check(t, func(t *rapid.T) {
		b := NewBook(secret)
		var newest version
		for range rapid.IntRange(1, 12).Draw(t, "passes") {
			v := version{rapid.Uint64Range(1, 3).Draw(t, "epoch"), rapid.Uint64Range(1, 3).Draw(t, "version")}
			p, newer, refused := b.Open(noon, "s", seal(t, secret, proxylink.Pass{Epoch: v.epoch, Version: v.settings}))
			if (refused != nil) != v.olderThan(newest) {
				t.Fatalf("%+v after %+v: %v", v, newest, refused)
			}
			if newer != (newest != version{} && newest.olderThan(v)) {
				t.Fatalf("%+v after %+v: newer %v", v, newest, newer)
			}
			if refused == nil {
				newest = v
				if b.Replaced(p) {
					t.Fatal("the newest counts as replaced")
				}
			}
		}
	})
}

func BenchmarkOpen(b *testing.B) {
	secret := trust.New()
	book := NewBook(secret)
	var p proxylink.Pass
	for range 10 {
		p.Routes = append(p.Routes, proxylink.Route{Rule: egress.Rule{Type: egress.Custom, Server: "http://proxy.test:1", DomainPattern: fmt.Sprintf("%0256d", 1)}})
	}
	sealed := seal(b, secret, p)
	b.ReportAllocs()
	for b.Loop() {
		if _, _, refused := book.Open(noon, "s", sealed); refused != nil {
			b.Fatal(refused)
		}
	}
}
