package session

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

func TestProxyNews(t *testing.T) {
	one, two := json.RawMessage(`{"type":"residential"}`), json.RawMessage(`[{"type":"none"}]`)
	for _, c := range []struct {
		name     string
		was, now hostlink.Settings
		data     string // "": no event
	}{
		{"none before and after", hostlink.Settings{Version: 1}, hostlink.Settings{Version: 2, KeepAlive: true}, ""},
		{"another setting of the session", hostlink.Settings{Proxy: one, ProxyTurn: 3}, hostlink.Settings{Proxy: one, ProxyTurn: 3, KeepAlive: true}, ""},
		{"set", hostlink.Settings{}, hostlink.Settings{Proxy: one}, `{"proxy":{"type":"residential"},"reason":"proxy_changed","state":"RUNNING"}`},
		{"changed and rotated", hostlink.Settings{Proxy: one}, hostlink.Settings{Proxy: two, ProxyTurn: 1}, `{"proxy":[{"type":"none"}],"reason":"proxy_changed","state":"RUNNING"}`},
		{"removed", hostlink.Settings{Proxy: one}, hostlink.Settings{}, `{"reason":"proxy_removed","state":"RUNNING"}`},
		{"rotated", hostlink.Settings{Proxy: one}, hostlink.Settings{Proxy: one, ProxyTurn: 1}, `{"proxy":{"type":"residential"},"reason":"proxy_rotated","state":"RUNNING"}`},
		{"too long to show", hostlink.Settings{}, hostlink.Settings{Proxy: json.RawMessage(`"` + strings.Repeat("x", maxShownProxy) + `"`)}, `{"reason":"proxy_changed","state":"RUNNING"}`},
	} {
		e, ok := proxyNews(c.was, c.now)
		if ok != (c.data != "") || string(e.Data) != c.data || ok && (e.Type != "lifecycle" || e.Text == "") {
			t.Errorf("%s: %v %+v %s", c.name, ok, e, e.Data)
		}
	}
}

func reasons(events []event.Event) (all []string) {
	for _, e := range events {
		var d struct {
			Reason string          `json:"reason"`
			Proxy  json.RawMessage `json:"proxy"`
		}
		if json.Unmarshal(e.Data, &d) == nil && d.Reason != "" {
			all = append(all, d.Reason+string(d.Proxy))
		}
	}
	return all
}

// A target whose verdict is about to come takes a change: its machine goes on
// with the pass of after, and the log says with which proxy.
func TestATargetTakesSettingsBeforeItsVerdict(t *testing.T) {
	for _, to := range []string{"a", "b"} {
		synctest.Test(t, func(t *testing.T) {
			all, o := prepare(t, session.Move, to, true, false, false)
			o.holder = o.from
			for _, do := range []func() error{o.prepare, o.capture, o.restore} {
				if err := do(); err != nil {
					t.Fatal(err)
				}
			}
			set := passed(7, "of after", time.Now().Add(2*time.Hour))
			set.PassEpoch, set.Proxy = o.epoch+1, json.RawMessage(`{"type":"custom"}`)
			st, err := o.to.host.Patch(t.Context(), "s", set)
			if err != nil || st.Version != 7 || st.Held == nil || st.Epoch != o.epoch+1 {
				t.Errorf("patched at %s: %+v, %v", to, st, err)
			}
			o.committed = true
			o.tell(t, o.to)
			if o.from != o.to {
				o.tell(t, o.from)
			}
			var shows []string
			for _, f := range o.to.alive() {
				if pass := f.shows(); f.started.SessionID == "s" && pass != "" {
					shows = append(shows, pass)
				}
			}
			if !slices.Equal(shows, []string{"of after"}) {
				t.Errorf("at %s its connections show %q", to, shows)
			}
			if got := reasons(o.to.events.all("s")); len(got) == 0 || got[len(got)-1] != `moved{"type":"custom"}` {
				t.Errorf("at %s the log says %q", to, got)
			}
			for _, w := range all {
				w.end()
			}
		})
	}
}

func TestTheLogTellsOfTheProxy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 2)
		defer r.close()
		a := order1("s", session.Browser, time.Hour)
		a.Proxy = json.RawMessage(`{"type":"residential"}`)
		if _, _, err := r.host.Acquire(t.Context(), a); err != nil {
			t.Fatal(err)
		}
		set := a.Settings
		for _, change := range []func(){
			func() { set.KeepAlive = true },
			func() { set.ProxyTurn = 1 },
			func() { set.Proxy = json.RawMessage(`[{"type":"none"}]`) },
			func() { set.Proxy = nil },
		} {
			set.Version++
			change()
			for range 2 { // told again it is no news
				if _, err := r.host.Patch(t.Context(), "s", set); err != nil {
					t.Fatal(err)
				}
			}
		}
		want := []string{`created{"type":"residential"}`, `proxy_rotated{"type":"residential"}`, `proxy_changed[{"type":"none"}]`, "proxy_removed"}
		if got := reasons(r.events.all("s")); !slices.Equal(got, want) {
			t.Errorf("the log says %q, want %q", got, want)
		}
	})
}
