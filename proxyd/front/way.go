package front

import (
	"errors"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// way is an open connection towards a target, straight or through a proxy.
type way struct {
	conn  proxylink.HalfCloser
	early []byte // what the site sent already
	flow  *meter.Flow
}

// decide says by which route a target is reached; nil is straight out. Pure but
// for the pass's memory of hosts. Names that go straight out are checked once
// they are resolved.
func (s *Server) decide(c *client, t egress.Target) (*proxylink.Route, *egress.Refusal) {
	if r := t.CheckPort(); r != nil {
		return nil, r
	}
	route, r := c.pass.Route(t.Host())
	if route != nil {
		r = s.Guard.CheckLiteral(t)
	}
	return route, r
}

// reach decides on what a client asked for, and connects. A refusal is told to
// all but the client. text is the target as the client wrote it.
func (s *Server) reach(c *client, method, text string, parse func() (egress.Target, *egress.Refusal)) (way, *egress.Refusal) {
	c.arrived()
	w, r := s.connectTo(c, parse)
	if r != nil {
		s.refuse(c, method, text, r)
	}
	return w, r
}

func (s *Server) connectTo(c *client, parse func() (egress.Target, *egress.Refusal)) (way, *egress.Refusal) {
	if c.refused != nil {
		return way{}, c.refused
	}
	t, r := parse()
	if r != nil {
		return way{}, r
	}
	route, r := s.decide(c, t)
	if r != nil {
		return way{}, r
	}
	c.target = t.String()
	via := viaOf(route)
	opened[via].Inc()
	if route == nil {
		conn, err := s.Guard.Dial(c.ctx, t)
		if err != nil {
			return way{}, asRefusal(err)
		}
		return way{conn: conn, flow: c.meter.Via(via)}, nil
	}
	link, r := s.Upstreams.Tunnel(c.ctx, route, t)
	if r != nil {
		return way{}, r
	}
	return way{conn: link.Conn, early: link.Early, flow: c.meter.Via(via)}, nil
}

// opened counts connections and plain requests by the way they take.
var opened = func() map[egress.Type]interface{ Inc() } {
	m := map[egress.Type]interface{ Inc() }{}
	for _, t := range []egress.Type{egress.None, egress.Residential, egress.Datacenter, egress.Custom} {
		m[t] = daemon.Counter(`berth_proxyd_ways_total{type="` + string(t) + `"}`)
	}
	return m
}()

// viaOf is the type of a route as metrics know it.
func viaOf(r *proxylink.Route) egress.Type {
	if r == nil || !r.Type.Proxied() {
		return egress.None
	}
	return r.Type
}

func asRefusal(err error) *egress.Refusal {
	var r *egress.Refusal
	if !errors.As(err, &r) {
		r = egress.Refuse(egress.UpstreamUnreachable, "the connection failed")
		r.Cause = err
	}
	return r
}

// maxShown bounds a target in the feed and in logs, bytes.
const maxShown = 300

// refuse tells metrics, log and the session's host of a refusal. What becomes
// of a connection whose client is gone is nobody's business.
func (s *Server) refuse(c *client, method, text string, r *egress.Refusal) {
	if len(text) > maxShown {
		text = text[:maxShown]
	}
	daemon.Counter(`berth_proxyd_refusals_total{reason="` + string(r.Reason) + `"}`).Inc()
	s.log.Info("refused", "session", c.hello.SessionID, "protocol", c.protocol, "target", text, "reason", string(r.Reason), "detail", r.Error())
	if c.hello.Host == "" {
		return
	}
	s.Feed.Put(c.hello.Host, proxylink.Refused{SessionID: c.hello.SessionID, Epoch: c.hello.Epoch, At: time.Now().UTC(),
		Method: method, Target: text, Reason: r.Reason, Detail: r.Detail})
}

// relay carries an accepted connection: what was read ahead, then both ways.
func (s *Server) relay(c *client, w way, ahead []byte) {
	ahead = append(ahead, c.buffered()...)
	c.release()
	if c.protocol != "http" {
		c.pass = nil // decided: a tunnel that stays open keeps no rules that changes have replaced
	}
	if len(ahead) > 0 {
		n, err := w.conn.Write(ahead)
		w.flow.Up(int64(n))
		if err != nil {
			w.conn.Close()
			c.abort()
			return
		}
	}
	c.err = proxylink.Relay(c.ctx, c.tcp, w.conn, w.flow.Up, w.flow.Down)
}
