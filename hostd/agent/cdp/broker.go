// Package cdp is the broker between a session's CDP clients and its Chrome: it
// ends every client's WebSocket, gives each its own connection to Chrome's
// browser endpoint, and copies messages both ways. See DESIGN.md.
package cdp

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

// Endpoint is where a running Chrome takes CDP connections.
type Endpoint struct {
	Addr string          // host:port
	Path string          // /devtools/browser/<id>
	Gone <-chan struct{} // closed when that Chrome has died
	// Page, unless nil, has to return before a client sees anything but the
	// browser itself: it has no page yet.
	Page func(ctx context.Context) error
}

// Chrome says where the machine's Chrome is, waiting while it is being started.
type Chrome interface {
	Endpoint(ctx context.Context) (Endpoint, error)
}

// Config wires a broker.
type Config struct {
	Chrome    Chrome
	Downloads string      // folder that finished downloads land in
	OnClients func(n int) // told every change of the count, in order; must not block
	// Await, if set, is called before each message of a client's goes to Chrome,
	// and returns when it may.
	Await func(ctx context.Context) error
}

// chromeWait bounds how long a client waits for a Chrome that is being started.
const chromeWait = 20 * time.Second

// goneWait bounds how long the end of a Chrome that refuses connections may
// take to be noticed.
const goneWait = 2 * time.Second

// Close codes a client sees from the agent. The gateway adds its own.
const (
	closeNormal   = 1000
	closeTooBig   = 1009
	closeProtocol = 1002
	closeRestart  = 1012 // reason "chrome restarted": connect again to the same URL
)

// Broker serves agentlink.PathCDP, PathJSONVersion and PathJSONList.
type Broker struct {
	cfg    Config
	log    *slog.Logger
	count  *count
	client http.Client // to Chrome's own HTTP server

	ctx  context.Context // ends with Close
	end  context.CancelFunc
	live sync.WaitGroup
}

// New makes a broker. Close ends it.
func New(cfg Config, log *slog.Logger) *Broker {
	if cfg.OnClients == nil {
		cfg.OnClients = func(int) {}
	}
	if cfg.Await == nil {
		cfg.Await = func(context.Context) error { return nil }
	}
	ctx, end := context.WithCancel(context.Background())
	return &Broker{
		cfg: cfg, log: log, ctx: ctx, end: end,
		count:  newCount(agentlink.GraceAfterPlatformClose, cfg.OnClients),
		client: http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second},
	}
}

// Clients is the number of CDP clients: those connected, and those whose
// socket the platform closed less than agentlink.GraceAfterPlatformClose ago.
func (b *Broker) Clients() int { return b.count.now() }

// HadClients says that a client has been counted at some time.
func (b *Broker) HadClients() bool { return b.count.had() }

// Close ends all clients and waits for them.
func (b *Broker) Close() {
	b.end()
	b.live.Wait()
	b.count.stop()
}

// Register mounts the broker's paths on mux.
func (b *Broker) Register(mux *http.ServeMux) {
	mux.HandleFunc(agentlink.PathCDP, b.ServeCDP)
	mux.HandleFunc(agentlink.PathJSONVersion, b.ServeVersion)
	mux.HandleFunc(agentlink.PathJSONList, b.ServeList)
}

// ServeCDP ends one client's WebSocket and returns when that client is gone.
func (b *Broker) ServeCDP(w http.ResponseWriter, r *http.Request) {
	b.live.Add(1)
	defer b.live.Done()
	key, err := checkUpgrade(r)
	if err != nil {
		reply.Error(w, r, err)
		return
	}
	chrome, endpoint, err := b.connect(r.Context())
	if err != nil {
		reply.Error(w, r, err)
		return
	}
	defer chrome.Close()
	// Counted before the client learns that it is connected, so that nobody
	// can see a connected client and a count without it.
	leave := b.enter(r.URL.Query().Get("viewer") == "1")
	code := 0
	defer func() { leave(code == agentlink.PlatformClose) }()
	conn, rest, err := upgrade(w, key)
	if err != nil {
		b.log.Debug("cdp upgrade", "err", err)
		return
	}
	defer conn.Close()
	code = newRelay(conn, rest, chrome, endpoint.Page, b.cfg, b.log).run(b.ctx, endpoint.Gone, func() { leave(true) })
}

// enter counts a client; leave ends that, by its first call only. It must come
// before a client is told to go, or the client is back first and counted twice.
func (b *Broker) enter(viewer bool) (leave func(byPlatform bool)) {
	if viewer {
		return func(bool) {}
	}
	b.count.enter()
	var once sync.Once
	return func(byPlatform bool) { once.Do(func() { b.count.leave(byPlatform) }) }
}

// connect opens a connection to Chrome. One that has died and whose end the
// supervisor has not seen yet is waited out: its clients come back at once.
func (b *Broker) connect(ctx context.Context) (*chromeConn, Endpoint, error) {
	for {
		e, err := b.endpoint(ctx)
		if err != nil {
			return nil, e, err
		}
		c, err := dialChrome(ctx, e)
		if err == nil {
			return c, e, nil
		}
		select {
		case <-e.Gone:
		case <-time.After(goneWait):
			return nil, e, apierr.Wrap(err, apierr.Unavailable, "Chrome does not answer; connect again in a moment").After(time.Second)
		case <-ctx.Done():
			return nil, e, context.Cause(ctx)
		}
	}
}

func (b *Broker) endpoint(ctx context.Context) (Endpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, chromeWait)
	defer cancel()
	e, err := b.cfg.Chrome.Endpoint(ctx)
	if err != nil {
		return Endpoint{}, apierr.Wrap(err, apierr.Unavailable, "Chrome is starting; connect again in a moment").After(time.Second)
	}
	return e, nil
}

var errNotWebSocket = errors.New("not a WebSocket request")
