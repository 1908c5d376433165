package api

import (
	"context"
	"iter"
	"net"
	"net/http"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/token"
)

// Service is what the handlers need of the use cases. Errors carry an apierr
// code; anything else is shown as internal.
type Service interface {
	Create(ctx context.Context, caller accounts.Caller, req sessions.CreateRequest) (v sessions.View, existing bool, err error)
	Get(ctx context.Context, caller accounts.Caller, id string) (sessions.View, error)
	List(ctx context.Context, caller accounts.Caller, req sessions.ListRequest) (page []sessions.View, nextCursor string, err error)
	Patch(ctx context.Context, caller accounts.Caller, id string, req sessions.PatchRequest) (sessions.View, error)
	RotateProxy(ctx context.Context, caller accounts.Caller, id string) (sessions.View, error)
	Release(ctx context.Context, caller accounts.Caller, id string) (sessions.View, error)
	Pause(ctx context.Context, caller accounts.Caller, id string) (sessions.View, error)
	Resume(ctx context.Context, caller accounts.Caller, id string) (sessions.View, error)
	Move(ctx context.Context, caller accounts.Caller, id string, req sessions.MoveRequest) (sessions.View, sessions.Timings, error)
	ReleaseAll(ctx context.Context, caller accounts.Caller) ([]sessions.View, error)
	Live(ctx context.Context, caller accounts.Caller, id string) (sessions.URLs, error)
	RotateURLs(ctx context.Context, caller accounts.Caller, id string, disconnect bool) (sessions.URLs, error)
	Events(ctx context.Context, caller accounts.Caller, id string, after uint64, types []event.Type, limit int) (hostlink.EventPage, error)
	FollowEvents(ctx context.Context, caller accounts.Caller, id string, after *uint64, types []event.Type) (iter.Seq2[event.Event, error], error)

	// OpenByToken lets the holder of a signed URL in: 401 for a bad token, 409
	// when the session has ended.
	OpenByToken(ctx context.Context, purpose token.Purpose, sessionID, tok string) (session.Session, error)
	// Running gives a session that has not ended: 404, 409. DialAgent and
	// AgentRoundTrip resume it if it is paused.
	Running(ctx context.Context, caller accounts.Caller, id string) (session.Session, error)
	standings
	// ConnectURL gives a session's CDP WebSocket URL.
	ConnectURL(s session.Session) string
	// WatchEnd blocks until sockets of this session have to close and says how;
	// the zero Ended means that ctx ended first.
	WatchEnd(ctx context.Context, s session.Session) sessions.Ended

	// DialAgent opens a stream to the session's agent, to speak HTTP/1.1 on.
	DialAgent(ctx context.Context, s session.Session) (net.Conn, error)
	// AgentRoundTrip sends a request to the session's agent on a kept stream.
	AgentRoundTrip(s session.Session, req *http.Request) (*http.Response, error)
}

// Accounts finds out who calls.
type Accounts interface {
	// Authenticate gives the caller of an API key; unauthorized for any other text.
	Authenticate(ctx context.Context, key string) (accounts.Caller, error)
	Me(ctx context.Context, caller accounts.Caller) (accounts.Me, error)
	// Usage reports what the caller's project used, with all that was counted
	// before the call.
	Usage(ctx context.Context, caller accounts.Caller, w accounts.Window) (accounts.Usage, error)
	Pricing() accounts.Prices
}
