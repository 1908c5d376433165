package session

import (
	"bytes"

	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// maxShownProxy is how long a proxy setting may be to stand in an event, whose
// bound it must not reach by itself. Bytes of JSON.
const maxShownProxy = 8 << 10

// proxyNews is what an order changed about a running session's proxy, as an
// event for its log; false: nothing.
func proxyNews(was, now hostlink.Settings) (event.Event, bool) {
	text, reason := "The session's proxy was changed.", "proxy_changed"
	switch {
	case !bytes.Equal(was.Proxy, now.Proxy) && len(now.Proxy) == 0:
		text, reason = "The session's proxy was removed.", "proxy_removed"
	case !bytes.Equal(was.Proxy, now.Proxy):
	case was.ProxyTurn != now.ProxyTurn:
		text, reason = "The session's proxy takes new addresses.", "proxy_rotated"
	default:
		return event.Event{}, false
	}
	return event.Event{Type: event.Lifecycle, Text: text,
		Data: mustJSON(withProxy(now, map[string]any{"state": session.Running, "reason": reason}))}, true
}

// withProxy adds the proxy in force to an event's data, if there is one.
func withProxy(set hostlink.Settings, data map[string]any) map[string]any {
	if n := len(set.Proxy); n > 0 && n <= maxShownProxy {
		data["proxy"] = set.Proxy
	}
	return data
}
