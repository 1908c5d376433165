package refusals

import (
	"encoding/json"
	"fmt"
	"net"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/proxylink"
)

// data is what a network event says of a connection that was not made (decisions
// "Streams"). No site answered, so there is no status, no byte went either way,
// and only the browser knows what it was for.
type data struct {
	Method       string        `json:"method"`
	URL          string        `json:"url"`
	Status       int           `json:"status"`
	ResourceType string        `json:"resourceType"`
	ErrorText    string        `json:"errorText"`
	ProxyError   egress.Reason `json:"proxyError"`
	BytesIn      int64         `json:"bytesIn"`
	BytesOut     int64         `json:"bytesOut"`
}

const (
	maxTarget = 300 // bytes, as the feed's contract says
	maxDetail = 1 << 10
)

// describe is the event of a refused connection.
func describe(r proxylink.Refused) event.Event {
	target, detail := event.Cut(r.Target, maxTarget), event.Cut(r.Detail, maxDetail)
	named := target
	if named == "" {
		named = "an unknown address"
	}
	return event.Event{At: r.At, Type: event.Network, Level: "warn", Text: fmt.Sprintf("A connection to %s was refused: %s.", named, detail),
		Data: encode(data{Method: r.Method, URL: address(r.Method, target), ResourceType: "other", ErrorText: detail, ProxyError: r.Reason})}
}

// more is the event that stands for refusals without one of their own.
func more(c *count) event.Event {
	return event.Event{At: c.last.At, Type: event.Network, Level: "warn",
		Text: fmt.Sprintf("%d more connections were refused within a second, the last of them to %s.", c.more, event.Cut(c.last.Target, maxTarget)),
		Data: encode(struct {
			Refused    int           `json:"refused"`
			ProxyError egress.Reason `json:"proxyError"` // of the last
		}{c.more, c.last.Reason})}
}

// address is the URL that a target is of, as far as one can tell: a tunnel to
// port 443 carries https and one to 80 http, and a plain request is http. Of
// other tunnels, and of what is no host and port, the target stands as it came.
func address(method, target string) string {
	host, port, err := net.SplitHostPort(target)
	tunnel := method == "CONNECT" || method == "SOCKS5"
	switch {
	case err != nil || host == "":
		return target
	case tunnel && port == "443":
		return "https://" + bracketed(host) + "/"
	case port == "80":
		return "http://" + bracketed(host) + "/"
	case !tunnel:
		return "http://" + target + "/"
	}
	return target
}

// bracketed is a host as it stands in a URL.
func bracketed(host string) string {
	for i := range len(host) {
		if host[i] == ':' {
			return "[" + host + "]"
		}
	}
	return host
}

func encode(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic("refusals: " + err.Error()) // texts and numbers always encode
	}
	return b
}
