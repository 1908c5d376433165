package sessions

import (
	"context"
	"net/url"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/token"
)

// urlLife is how long live and terminal URLs are good for (decisions "API
// manners"); a connect URL lives as long as its session.
const urlLife = time.Hour

// view dresses a session for a response.
func (s *Service) view(found session.Session) View {
	now := time.Now()
	return View{Session: found, URLs: s.urls(found, now), Used: session.Usage(found, now),
		Cost: s.cfg.Rates.Session(s.record.View(), found, now)}
}

func (s *Service) urls(found session.Session, now time.Time) URLs {
	id, base := found.ID, s.cfg.PublicURL
	u := URLs{Live: base + "/live/" + id + "?token=" + s.sign(found, token.Live, now.Add(urlLife))}
	if found.Kind.HasBrowser() {
		u.Connect = s.ConnectURL(found)
	}
	if found.Kind.HasShell() {
		u.Terminal = "/v1/sessions/" + id + "/terminal?token=" + s.sign(found, token.Terminal, now.Add(urlLife))
	}
	return u
}

// ConnectURL gives a session's CDP WebSocket URL; scheme and host are those of
// the public URL.
func (s *Service) ConnectURL(found session.Session) string {
	u, err := url.Parse(s.cfg.PublicURL)
	if err != nil { // checked at start
		panic(err)
	}
	u.Scheme = map[string]string{"https": "wss", "http": "ws"}[u.Scheme]
	u.Path += "/v1/connect"
	// By hand: the spec shows sessionId first, and neither value needs escaping.
	u.RawQuery = "sessionId=" + found.ID + "&token=" + s.sign(found, token.Connect, time.Time{})
	return u.String()
}

func (s *Service) sign(found session.Session, p token.Purpose, expires time.Time) string {
	return token.Sign(s.record.View().SigningKey(), token.Claims{SessionID: found.ID, Purpose: p,
		KeyVersion: found.URLKeyVersion, Expires: expires, MinIndex: found.URLIndex})
}

// Live gives fresh signed URLs.
func (s *Service) Live(ctx context.Context, caller accounts.Caller, id string) (URLs, error) {
	found, err := s.Running(ctx, caller, id)
	if err != nil {
		return URLs{}, err
	}
	return s.urls(found, time.Now()), nil
}

// RotateURLs makes every older token of the session fail; with disconnect the
// clients they let in are cut too.
func (s *Service) RotateURLs(ctx context.Context, caller accounts.Caller, id string, disconnect bool) (URLs, error) {
	if _, err := s.Running(ctx, caller, id); err != nil {
		return URLs{}, err
	}
	found, err := s.record.RotateURLs(ctx, id, disconnect)
	if err != nil {
		return URLs{}, err
	}
	return s.urls(found, time.Now()), nil
}

// OpenByToken lets the holder of a signed URL in. A bad, expired or rotated
// token is Unauthorized whether or not the session exists.
func (s *Service) OpenByToken(ctx context.Context, purpose token.Purpose, sessionID, tok string) (session.Session, error) {
	refused := apierr.New(apierr.Unauthorized, "token: not valid for this session; GET /v1/sessions/%s gives fresh URLs", sessionID)
	claims, err := token.Verify(s.record.View().SigningKey(), time.Now(), sessionID, purpose, tok)
	if err != nil {
		return session.Session{}, refused
	}
	if s.record.View().Index() < claims.MinIndex { // a fresh URL, and this gateway lags
		if err := s.record.Fresh(ctx, claims.MinIndex); err != nil {
			return session.Session{}, err
		}
	}
	found, err := s.session(ctx, sessionID, claims.MinIndex)
	if err != nil {
		if apierr.Is(err, apierr.NotFound) {
			err = refused
		}
		return session.Session{}, err
	}
	if found.Status.Ended() {
		return found, running(found)
	}
	if claims.KeyVersion != found.URLKeyVersion {
		return session.Session{}, refused
	}
	return found, nil
}
