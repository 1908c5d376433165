package session

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/berth-dev/berth/shared/hostlink"
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
